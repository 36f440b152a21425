"""Exchange plain values between ranks."""
