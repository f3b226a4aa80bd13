"""XLA's flags for tiny models, as words of ``XLA_FLAGS``: `make test` asks this file, ranks of tests import it.

LLVM's optimisation takes more time than it saves there.
"""

from pallas_kernels.compat import COMPILED_QUICKLY

FLAGS = [f"--{name}={str(value).lower()}" for name, value in COMPILED_QUICKLY.items()]

if __name__ == "__main__":
    print(*FLAGS)
