"""``python -m sandboxd`` is the ``sandboxd`` program."""

from sandboxd.cli import main

if __name__ == "__main__":
    main()
