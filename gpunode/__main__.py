"""``python3 -m gpunode``."""

from gpunode.cli import main

if __name__ == "__main__":
    main()
