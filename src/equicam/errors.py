class EquicamError(ValueError):
    """Something the caller can put right: what needs what, what was given instead, and what to try."""

    def __init__(self, what: str, *, needs: str, got: object, fix: str) -> None:
        super().__init__(f"{what} needs {needs}, got {got}; try {fix}")
