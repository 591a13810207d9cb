/* What the files of librdmacm (cm_*.c) share: ids, event channels, events. */
#ifndef RDMACM_CM_H
#define RDMACM_CM_H

#include "library.h"

enum {
    CM_AF_IB = 27,
    CM_REASON_CONSUMER = 28, /* of a rejection */
    CM_REASON_ECE = 35,
    CM_ROUTE_TIMEOUT = 2000, /* milliseconds for each step of rdma_create_ep(3) */
    CM_MOST_PRIVATE_DATA = 255,
};

/* RAI_PASSIVE of ai_flags, a macro in C's header */
enum { CM_RAI_PASSIVE = 1 };

struct sockaddr_ib {
    uint16_t sib_family;
    __be16 sib_pkey;
    __be32 sib_flowinfo;
    uint8_t sib_addr[16];
    __be64 sib_sid, sib_sid_mask;
    uint64_t sib_scope_id;
};

/* An event channel. Its mutex is that of all (cm_lock()); ids have references to it. */
struct cm_channel {
    struct rdma_event_channel channel; /* the first member */
    uint32_t number;                   /* the server's */
    unsigned references;
    unsigned users; /* threads that wait for an event */
    bool is_destroyed;
};

/* What an event is for: an id, or its membership of a multicast group. The server has `uid`. */
struct cm_target {
    uint64_t uid;
    bool is_group;
    unsigned unacknowledged; /* events that the program has */
};

struct cm_id {
    struct rdma_cm_id id; /* the first member */
    struct cm_target target;
    struct cm_channel *channel;
    uint32_t handle; /* the server's number */
    bool is_synchronous; /* the channel is its own, and calls wait for their events */
    bool has_failed;     /* CONNECT_ERROR was reported: an end that the peer reports then is no news */
    uint8_t responder_resources, initiator_depth; /* of the request, then as they were chosen */
    struct cm_group *groups;
    /* of rdma_create_ep(3) */
    struct ibv_pd *pd;                   /* for the connections of a listening endpoint */
    struct ibv_qp_init_attr *attributes; /* the same */
    uint8_t *connect_data;               /* goes before the private data of rdma_connect(3) */
    size_t connect_length;
    struct ibv_ece local_ece, remote_ece;
};

struct cm_group {
    struct cm_target target; /* the first member */
    struct cm_id *id;
    struct cm_group *next;
    uint32_t handle;
    bool is_send_only, is_attached;
    void *context;
    union ibv_gid gid;
    uint16_t lid;
    struct sockaddr_storage address;
};

struct cm_event {
    struct rdma_cm_event event; /* the first member */
    struct cm_id *id;           /* that it is counted for: of a request, the listener */
    struct cm_group *group;
    uint8_t private_data[256];
};

static inline struct cm_id *cm_id_of(struct rdma_cm_id *id) { return (struct cm_id *)id; }
static inline struct cm_channel *cm_channel_of(struct rdma_event_channel *channel) {
    return (struct cm_channel *)channel;
}
static inline bool cm_is_datagram(const struct rdma_cm_id *id) { return id->qp_type == IBV_QPT_UD; }

/* -- channels and ids (cm.c) --------------------------------------------------------------------------------------- */

void cm_lock(void);
void cm_unlock(void);
/* Give a target its uid, by which events find it; false: no memory. */
bool cm_target_add(struct cm_target *target);
/* No event finds it any more. With the lock. */
void cm_target_remove(struct cm_target *target);
struct cm_target *cm_target_find(uint64_t uid);
/* An event was acknowledged. With the lock. */
void cm_acknowledged(struct cm_target *target);
/* Wait until the program has acknowledged all events. With the lock. */
void cm_wait_for_acknowledgements(const struct cm_target *target);
void cm_channel_release(struct cm_channel *channel);
/* A synchronous id; NULL with errno. */
struct cm_id *cm_create(enum rdma_port_space ps, enum ibv_qp_type qp_type);
/* An id that the server has already, on the channel of its listener; NULL with errno. */
struct cm_id *cm_adopt(const struct cm_id *listener, uint32_t handle);
/* Ask the server about an id: a command without a reply; -1 with errno. */
int cm_tell(const struct cm_id *id, uint32_t command, const void *in, size_t size);
int cm_ask(const struct cm_id *id, uint32_t command, const void *in, size_t size, void *out, size_t out_size);
/* The same for what ends with an event, which a synchronous id waits for. */
int cm_do(struct cm_id *id, uint32_t command, const void *in, size_t size);
/* Tell the server that an id is no more. */
void cm_discard(const struct cm_channel *channel, uint32_t handle);

/* -- events (cm_events.c) ------------------------------------------------------------------------------------------ */

/* Wait for the event of what a synchronous id has begun; its error is the errno. */
int cm_complete(struct cm_id *id);
/* Acknowledge the event that a synchronous id shows. */
void cm_drop_event(struct cm_id *id);

/* -- addresses (cm_route.c) ---------------------------------------------------------------------------------------- */

size_t cm_address_length(const struct sockaddr *address);
/* Ask for the addresses of an id and for its device, and set them; -1 with errno. */
int cm_query_address(struct cm_id *id);
/* Ask for its path; -1 with errno. */
int cm_query_path(struct cm_id *id);

/* -- queue pairs (cm_queues.c) ------------------------------------------------------------------------------------- */

/* The default protection domain of a device; NULL with errno. */
struct ibv_pd *cm_default_pd(struct ibv_context *context);
/* Take the queue pair, if there is one, through INIT and RTR to RTS; -1 with errno. The numbers are the most READs and
 * atomic operations as responder and as initiator; RDMA_MAX_RESP_RES: as the connection has them. */
int cm_connect_queue_pair(struct cm_id *id, uint8_t responder_resources, uint8_t initiator_depth);
/* Take it, if there is one, to ERR. */
int cm_fail_queue_pair(struct cm_id *id);
void cm_copy_ah_attr(struct ibv_ah_attr *to, const struct ib_uverbs_ah_attr *from);

/* -- connections (cm_connect.c, cm_multicast.c) -------------------------------------------------------------------- */

/* The peer has accepted: connect the queue pair, and tell the peer. -1 with errno. */
int cm_finish_connect(struct cm_id *id);
/* The server has joined a group: attach the queue pair; -1 with errno. */
int cm_finish_join(struct cm_group *group, const struct rdma_ud_param *param);
/* Free the memberships of an id that is destroyed. With the lock. */
void cm_free_groups(struct cm_id *id);

/* -- exported functions -------------------------------------------------------------------------------------------- */

struct rdma_event_channel *rdma_create_event_channel(void);
void rdma_destroy_event_channel(struct rdma_event_channel *channel);
int rdma_create_id(struct rdma_event_channel *channel, struct rdma_cm_id **id, void *context, enum rdma_port_space ps);
int rdma_destroy_id(struct rdma_cm_id *id);
int rdma_migrate_id(struct rdma_cm_id *id, struct rdma_event_channel *channel);
int rdma_bind_addr(struct rdma_cm_id *id, struct sockaddr *address);
int rdma_resolve_addr(struct rdma_cm_id *id, struct sockaddr *source, struct sockaddr *destination, int timeout_ms);
int rdma_resolve_route(struct rdma_cm_id *id, int timeout_ms);
int rdma_set_option(struct rdma_cm_id *id, int level, int name, void *value, size_t length);
int rdma_get_cm_event(struct rdma_event_channel *channel, struct rdma_cm_event **event);
int rdma_ack_cm_event(struct rdma_cm_event *event);
int rdma_create_qp(struct rdma_cm_id *id, struct ibv_pd *pd, struct ibv_qp_init_attr *attributes);
int rdma_create_qp_ex(struct rdma_cm_id *id, struct ibv_qp_init_attr_ex *attributes);
void rdma_destroy_qp(struct rdma_cm_id *id);
int rdma_create_srq_ex(struct rdma_cm_id *id, struct ibv_srq_init_attr_ex *attributes);
void rdma_destroy_srq(struct rdma_cm_id *id);
int rdma_init_qp_attr(struct rdma_cm_id *id, struct ibv_qp_attr *attributes, int *mask);
int rdma_join_multicast_ex(struct rdma_cm_id *id, struct rdma_cm_join_mc_attr_ex *attributes, void *context);

struct ibv_pd *ibv_alloc_pd(struct ibv_context *context);
int ibv_query_device(struct ibv_context *context, struct ibv_device_attr *attributes);
struct ibv_comp_channel *ibv_create_comp_channel(struct ibv_context *context);
int ibv_destroy_comp_channel(struct ibv_comp_channel *channel);
struct ibv_cq *ibv_create_cq(struct ibv_context *context, int size, void *cq_context, struct ibv_comp_channel *channel,
                             int vector);
int ibv_destroy_cq(struct ibv_cq *cq);
int ibv_modify_qp(struct ibv_qp *qp, struct ibv_qp_attr *attributes, int mask);
int ibv_destroy_qp(struct ibv_qp *qp);
int ibv_destroy_srq(struct ibv_srq *srq);
int ibv_attach_mcast(struct ibv_qp *qp, const union ibv_gid *gid, uint16_t lid);
int ibv_detach_mcast(struct ibv_qp *qp, const union ibv_gid *gid, uint16_t lid);

#endif
