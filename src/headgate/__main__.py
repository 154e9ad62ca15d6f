"""`python -m headgate` is the `headgate` command."""

import sys

EXIT_INTERRUPTED = 130


def main() -> None:
    """Run the command; Ctrl-C while it is being loaded is no reason for a traceback."""
    try:
        from headgate.cli.main import main as command  # noqa: PLC0415
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
    command()


if __name__ == "__main__":
    main()
