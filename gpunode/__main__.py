"""The package as a program, for Python's option ``-m``."""

from gpunode.cli import main

if __name__ == "__main__":
    main()
