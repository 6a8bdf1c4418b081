"""`python -m launch` is hvdlaunch."""

from launch.cli import main

if __name__ == "__main__":
    main()
