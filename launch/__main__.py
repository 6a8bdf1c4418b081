"""`python -m launch` is hvdlaunch."""

from launch.cli.main import main

if __name__ == "__main__":
    main()
