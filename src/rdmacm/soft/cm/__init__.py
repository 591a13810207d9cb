"""The ids of the soft device, and the connection managers that connect them."""
