"""redis-py with a server at a port: strings, a pipeline, a subscription. Ends the server."""

import sys

import redis

server = redis.Redis(port=int(sys.argv[1]))
server.set("key", "v" * 100_000)
with server.pipeline() as pipeline:
    for _ in range(100):
        pipeline.incr("count")
    counted = pipeline.execute()[-1]
subscription = server.pubsub()
subscription.subscribe("channel")
told = [subscription.get_message(timeout=30)["type"]]
server.publish("channel", "message")
told.append(subscription.get_message(timeout=30)["data"].decode())
print(len(server.get("key")), counted, *told)
server.shutdown(nosave=True)
