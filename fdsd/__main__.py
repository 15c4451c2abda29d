"""``python -m fdsd``: the same as the command ``fdsd``."""

from fdsd.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
