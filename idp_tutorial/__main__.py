"""Run `idp` as `python -m idp_tutorial`."""

from idp_tutorial.cli.main import main

if __name__ == "__main__":
    main()
