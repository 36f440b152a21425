"""Exchange of plain values between ranks."""
