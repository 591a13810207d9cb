"""The soft device as the verbs see it: memory, queues, queue pairs, and who sends when."""
