"""The option ``certificate`` of a strategy. Torch is not imported here: a launcher reads it."""

CHOICES = ("refuse", "warn", "off")


def validate_certificate(choice: str) -> list[str]:
    """Problems of the option; empty when it is possible."""
    return [] if choice in CHOICES else [f"certificate={choice!r} (allowed: 'refuse', 'warn', 'off')"]
