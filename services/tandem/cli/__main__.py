"""``python -m tandem.cli``, where the ``tandem`` command is not on the path."""

from tandem.cli.app import app

app()
