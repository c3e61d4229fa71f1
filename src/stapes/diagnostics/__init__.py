"""What is wrong with this machine, and where its time goes."""
