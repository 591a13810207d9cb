"""The communication manager: its messages, its state tables and the engine that runs them."""
