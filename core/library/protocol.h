/* What a program's library and its server (rdmacm run) say to each other.
 *
 * The socket is a Unix socket of packets (SOCK_SEQPACKET), whose path is in the environment variable RDMACM_RUN_SOCKET.
 * Each request is one packet, and so is its reply; a connection has one request under way at a time. A process may have
 * several connections. Numbers have the byte order and the alignment of the machine. docs/run-design.md describes the
 * protocol, src/rdmacm/run/protocol.py is the other side.
 */
#ifndef RDMACM_PROTOCOL_H
#define RDMACM_PROTOCOL_H

#include <stdint.h>

enum {
    RUN_VERSION = 1,
    RUN_MOST = 65536, /* bytes of a packet */

    /* Types of requests. Up to 0xFF: a command of the kernel's rdma_cm (RDMA_USER_CM_CMD_...). Its body is the command's
     * structure, without rdma_ucm_cmd_hdr; that of the reply is what the kernel writes to `response`, which is unused.
     * The value of SET_OPTION follows the structure; `fd` of MIGRATE_ID is the old channel's number. GET_EVENT is none:
     * see RUN_CHANNEL_OPEN. */
    RUN_HELLO = 0x100, /* the first request of a connection: struct run_hello; the reply: struct run_welcome */
    RUN_DEVICES,       /* no body; the reply: struct run_devices, then the devices */
    RUN_SLOT,          /* no body; the reply: struct run_slot, with the sockets as ancillary data */
    RUN_GROUP,         /* struct run_group; the reply has no body, but a socket that has joined the group */
    RUN_CHANNEL_OPEN,  /* an event channel. No body; the reply: struct run_number, the channel's, with one end of a pair
                          of sockets (SOCK_SEQPACKET) as ancillary data. Events arrive there, a packet of struct
                          rdma_ucm_event_resp each, one at a time: the next follows when the last was received, and one
                          that was not goes back when its id is destroyed or migrates */
    RUN_CHANNEL_CLOSE, /* no body; its ids are destroyed */
    RUN_ADDRINFO,      /* struct run_addrinfo, then two strings that end with 0, node and service, empty for NULL; the
                          reply: struct run_addrinfos, then the results */
    RUN_CONTEXT_OPEN,  /* struct run_number, a device's index, with the end of a pipe as ancillary data: the server writes
                          the asynchronous events of the device and its port to it, a struct ibv_async_event each. It
                          does not wait for room. The reply: struct run_number, the context's */
    RUN_CONTEXT_CLOSE, /* struct run_number */
    RUN_TAP,           /* if the packets are captured. No body; the reply has none, but a socket (SOCK_SEQPACKET) that the
                          program sends each datagram to which it reads or is about to send: struct run_tapped, then the
                          payload. All programs have the same, so that it keeps their order */
    RUN_COUNTERS,      /* no body; the reply has none, but memory of the program that the server can read, where it counts
                          its packets: struct shared_counters of objects.h, all 0 */
    RUN_HOLE,          /* struct run_hole: a connection has failed, as long packets do not arrive. The server tells the
                          user. The reply has no body */
};

struct run_request {
    uint32_t type;
    uint32_t channel; /* the event channel of a command of rdma_cm, and of RUN_CHANNEL_CLOSE; else 0 */
};

struct run_reply {
    int32_t error; /* errno; of RUN_ADDRINFO a code of getaddrinfo(3), which is negative; 0: done, and the body follows */
    uint32_t reserved;
};

struct run_hello {
    uint32_t version; /* RUN_VERSION; another one is EPROTO */
    uint32_t pid;
};

/* What the command was asked for that programs do themselves. */
struct run_welcome {
    uint32_t version;     /* RUN_VERSION */
    uint32_t is_captured; /* whether RUN_TAP has a socket */
    double loss;          /* how likely each packet is lost that the program sends, from 0 to 1 */
    double delay;         /* seconds that each is held up */
    uint64_t seed;        /* decides which are lost; another one for each program */
};

/* A datagram, or a train of packets. */
struct run_tapped {
    uint64_t nanoseconds; /* since 1970 */
    uint8_t local[16], remote[16];
    uint32_t address_length; /* 4 or 16 */
    uint16_t local_port, remote_port;
    uint32_t is_out;
    uint32_t segment; /* bytes of a packet of a train, 0: it is a single one */
};

struct run_number {
    uint32_t number;
    uint32_t reserved;
};

struct run_devices {
    uint32_t count;
    uint32_t reserved;
};

/* A device, which has one port; its rows of the GID table follow. */
struct run_device {
    char name[64];
    uint64_t node_guid, system_image_guid; /* in network byte order */
    uint32_t index;
    uint32_t ifindex;    /* of its interface */
    uint32_t state;      /* enum ibv_port_state */
    uint32_t phys_state; /* 5: link up, 3: disabled */
    uint32_t max_mtu, active_mtu; /* enum ibv_mtu */
    uint32_t gids_count;
    uint32_t gid_table_length;
};

/* A row of a GID table that has a GID. */
struct run_gid {
    uint8_t gid[16];
    uint32_t index;
    uint32_t type;    /* 2: RoCE v2 */
    uint32_t ifindex; /* of the interface that has the address */
    uint32_t reserved;
};

/* A range of queue pair numbers, and the sockets where their packets arrive and leave from. */
struct run_slot {
    uint32_t first_qpn, count;
    uint32_t port;     /* of UDP that the sockets are bound to, 4791 */
    uint32_t families; /* which sockets there are, in this order: bit 0 IPv4, bit 1 IPv6 */
};

struct run_group {
    uint8_t gid[16];
    uint32_t ifindex; /* of the device's interface */
    uint32_t reserved;
};

/* Lengths of packets, as IP counts them. */
struct run_hole {
    uint8_t remote[16];      /* the peer's address */
    uint32_t address_length; /* 4 or 16 */
    uint32_t qp_num;
    uint32_t arrived, lost; /* of a packet that the peer has answered, and of the longest of the message */
};

/* The hints of rdma_getaddrinfo(3). */
struct run_addrinfo {
    uint32_t has_hints;
    int32_t flags, family, qp_type, port_space;
    uint32_t source_length, destination_length; /* bytes of the addresses; 0: none */
    uint32_t reserved;
    uint8_t source[128], destination[128]; /* struct sockaddr_storage */
};

struct run_addrinfos {
    uint32_t count;
    uint32_t reserved;
};

/* A result. Behind it: source, destination, canonical names of source and destination (with their final 0), route,
 * connection data; each has the given length, and begins at a multiple of 8 bytes. */
struct run_result {
    int32_t flags, family, qp_type, port_space;
    uint32_t source_length, destination_length;
    uint32_t source_name_length, destination_name_length;
    uint32_t route_length, connect_length;
};

#endif
