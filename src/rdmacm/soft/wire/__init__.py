"""The soft device's network: UDP port 4791, shared by the processes of a host."""
