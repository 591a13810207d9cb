"""The commands of ``rdmacm``, with their summaries: the help page lists them without an import of each."""

from __future__ import annotations

#: The commands by purpose, in the order of the help page: command → summary. Each is a module of this package,
#: imported when it is used.
GROUPS = {
    "Look up devices, names and routes": {
        "devices": "list the RDMA devices, their ports and GID tables",
        "sa": "query the subnet administrator of an InfiniBand fabric",
        "getaddrinfo": "resolve a name and a service to RDMA addresses",
        "resolve": "resolve a destination to a device, a GID and a route",
        "explain": "resolve a destination and explain the result",
    },
    "Find what is wrong": {
        "doctor": "find what keeps connections from working on this host",
        "check": "find what is wrong on the way to a peer, as mtr(8) for RDMA",
        "trace": "find RDMA connections in captured packets, and what went wrong",
    },
    "Connect and move data": {
        "demo": "two processes connect, move data both ways and check it",
        "rping": "ping-pong by RDMA READ and WRITE, as rping(1)",
        "ucmatose": "exchange messages over several connections, as ucmatose(1)",
        "udaddy": "exchange datagrams, as udaddy(1)",
        "mckey": "send datagrams to a multicast group, as mckey(1)",
        "rstream": "send bytes to and fro through an rsocket, as rstream(1)",
        "riostream": "write into a peer's memory by an rsocket, as riostream(1)",
        "rcopy": "copy a file to another host through an rsocket, as rcopy(1)",
        "udpong": "exchange datagrams through rsockets, as udpong(1)",
    },
    "Measure": {
        "cmtime": "time each step of setting up connections",
        "perf": "measure latency and bandwidth",
        "stat": "show what devices have counted: drops, errors, messages",
    },
    "Run other programs": {
        "run": "run a program of libibverbs on the software devices",
        "lab": "hosts on one machine, for any user: run commands in them",
    },
    "Set up a shell": {
        "completion": "write the completion of this command for a shell",
    },
}
COMMANDS = {command: summary for commands in GROUPS.values() for command, summary in commands.items()}
