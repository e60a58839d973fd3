"""`shoal completion`: a script that makes the shell complete commands, recipes, fields and runs."""

import click
from click.shell_completion import get_completion_class


@click.command("completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def command(shell: str) -> None:
    """Print a completion script for SHELL.

    \b
    bash:  shoal completion bash > ~/.local/share/bash-completion/completions/shoal
    zsh:   shoal completion zsh > "${fpath[1]}/_shoal"
    fish:  shoal completion fish > ~/.config/fish/completions/shoal.fish
    """
    from shoal.cli.main import shoal

    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(kind(shoal, {}, "shoal", "_SHOAL_COMPLETE").source())
