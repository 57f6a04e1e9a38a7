"""`python -m sif_tools`."""

from sif_tools.cli import main

if __name__ == "__main__":
    main()
