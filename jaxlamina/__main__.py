"""`python -m jaxlamina`: the command line, where the script is not on the path."""

from jaxlamina.cli.main import run

if __name__ == "__main__":
    run()
