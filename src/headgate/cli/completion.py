"""`headgate completion`: a script that completes commands and options in a shell."""

from __future__ import annotations

import click

SHELLS = ("bash", "zsh", "fish")


@click.command(
    epilog="""\b
Examples:
  eval "$(headgate completion bash)"           in ~/.bashrc
  eval "$(headgate completion zsh)"            in ~/.zshrc
  headgate completion fish > ~/.config/fish/completions/headgate.fish
"""
)
@click.argument("shell", type=click.Choice(SHELLS))
@click.option("--json", "as_json", is_flag=True, help="Write the script as JSON.")
@click.pass_context
def completion(context: click.Context, *, shell: str, as_json: bool) -> None:
    """Print a script that completes commands and options with the Tab key."""
    from click.shell_completion import get_completion_class  # noqa: PLC0415

    kind = get_completion_class(shell)
    assert kind is not None  # noqa: S101 - the choice has no other shell
    root = context.find_root()
    script = kind(root.command, {}, "headgate", "_HEADGATE_COMPLETE").source()
    if as_json:
        from headgate.cli.output import print_json  # noqa: PLC0415

        print_json({"shell": shell, "script": script})
    else:
        click.echo(script)
