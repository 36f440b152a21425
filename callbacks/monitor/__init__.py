"""What a run costs and where its time goes: one small callback per concern, and who keeps what they found."""
