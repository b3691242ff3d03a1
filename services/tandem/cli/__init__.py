"""``tandem``: one sub-command a role. The composition root; heavy imports wait until they are needed."""

from tandem.cli.app import app

__all__ = ["app"]
