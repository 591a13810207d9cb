/* rsocket(7): the queue pair of a local address of a datagram socket; with the socket's lock. */
#ifndef RDMACM_RS_END_H
#define RDMACM_RS_END_H

#include "rs_peers.h"
#include "rs_socket.h"

enum {
    RS_GRH = 40, /* bytes before each message in a slot */
    RS_SLOT = RS_GRH + RS_MOST_DATAGRAM,
    RS_IS_SEND = 1 << 30, /* of wr_id, which has a slot otherwise */
};

struct rs_end {
    struct rs_end *next;
    struct sockaddr_storage address;
    struct rdma_cm_id *id;
    struct ibv_pd *pd;
    struct ibv_comp_channel *comp_channel;
    struct ibv_cq *cq;
    struct ibv_mr *mr;
    uint8_t *memory; /* the slots of receives, then those of sends */
    uint32_t receives, sends;
    uint32_t *free_slots, free_count;
    size_t longest; /* payload, in bytes */
    uint8_t header[RS_MOST_SOURCE_HEADER];
    size_t header_length;
};

struct rs_peer_key rs_key_of(const struct sockaddr_storage *address);
struct sockaddr_storage rs_address_of(const struct rs_peer_key *key, uint32_t flow);
uint16_t *rs_port_in(struct sockaddr_storage *address);
bool rs_is_any(const struct sockaddr_storage *address);

/* NULL with errno. */
struct rs_end *rs_end_open(struct rs_socket *rs, const struct sockaddr_storage *address);
/* errno stays as it is. */
void rs_end_close(struct rs_end *end);
void rs_end_post_receive(struct rs_end *end, uint32_t slot);
/* 0 or an errno: EAGAIN, there is no slot. */
int rs_end_send(struct rs_end *end, struct ibv_ah *ah, uint32_t qpn, const struct iovec *vectors, size_t count);
/* The index of a GID in the table of a port; -1: it is in none. */
int rs_gid_index(struct ibv_context *context, uint8_t port_num, const union ibv_gid *gid);

#endif
