"""Processes of ranks and their rendezvous."""
