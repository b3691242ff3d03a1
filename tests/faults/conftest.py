from tests.support.staging import stage

__all__ = ["stage"]
