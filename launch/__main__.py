"""`python -m launch`: one rank (see `launch.rank`)."""

from launch.rank import run

if __name__ == "__main__":
    run()
