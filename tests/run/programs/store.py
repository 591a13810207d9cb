"""InfiniStore: ``store.py ADDRESS DEVICE PORT [client]``. A client's blocks go to the server, and come back."""

import asyncio
import os
import sys
from ctypes import addressof, c_char, memset

import infinistore
import uvloop

SIZE, BLOCKS = 256 << 10, 256
address, device, port, *client = sys.argv[1:]
common = {"service_port": int(port), "dev_name": device, "link_type": infinistore.LINK_ETHERNET, "log_level": "info"}
if client:
    config = infinistore.ClientConfig(host_addr=address, connection_type=infinistore.TYPE_RDMA, **common)
    connection = infinistore.InfinityConnection(config)
    connection.connect()
    data = os.urandom(SIZE * BLOCKS)
    memory = (c_char * len(data)).from_buffer_copy(data)
    connection.register_mr(addressof(memory), len(data))
    blocks = [(f"block {number}", number * SIZE) for number in range(BLOCKS)]

    async def write_and_read() -> None:
        await connection.rdma_write_cache_async(blocks, SIZE, addressof(memory))
        memset(memory, 0, len(data))
        await connection.rdma_read_cache_async(blocks, SIZE, addressof(memory))

    asyncio.run(write_and_read())
    assert memory.raw == data
    connection.close()
    print("done", flush=True)
else:
    loop = uvloop.new_event_loop()
    asyncio.set_event_loop(loop)
    config = infinistore.ServerConfig(prealloc_size=1, minimal_allocate_size=64, manage_port=18080, **common)
    infinistore.register_server(loop, config)
    print("ready", flush=True)
    loop.run_forever()
