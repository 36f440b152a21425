"""Start the processes of ranks and connect them."""
