/* What the files of rsocket(7), rs_*.c, share: sockets and how calls wait. */
#ifndef RDMACM_RS_SOCKET_H
#define RDMACM_RS_SOCKET_H

#include "cm.h"
#include "objects.h"
#include "rs_stream.h"

#include <poll.h>

enum { RS_RESOLVE_TIMEOUT = 2000 }; /* milliseconds, of an address and of a route */

enum { RS_SOL_RDMA = 0x10000, RS_SQSIZE = 0, RS_RQSIZE, RS_INLINE, RS_IOMAPSIZE, RS_ROUTE };

/* Those of a listener are copied to the sockets that it accepts. */
struct rs_options {
    int send_buffer, receive_buffer;             /* bytes */
    int send_queue, receive_queue;               /* work requests */
    int inlined;                                 /* bytes */
    int mappings;                                /* of the peer, at most */
    int reuse_address, only_ipv6;
    int keepalive, keep_idle;                    /* seconds */
    /* kept, without effect */
    int keep_interval, keep_count, no_delay, oob_inline, cork, quick_ack, defer_accept, user_timeout, fast_open;
    struct linger linger;
    struct timeval receive_timeout, send_timeout; /* of calls that wait; 0: for ever */
};

enum rs_phase { RS_IDLE, RS_LISTENING, RS_CONNECTING, RS_HAS_STREAM, RS_ENDED };

/* Memory that the peer may write by its offset. */
struct rs_mapped {
    struct rs_mapped *next;
    struct ibv_mr *mr;
    uint64_t offset;
    uint32_t index;
};

/* The number of a socket is the descriptor of its event channel. It may have more, which are duplicates of that. */
struct rs_socket {
    int fd;
    unsigned users;            /* the table, and calls; of the table's lock */
    unsigned numbers;          /* in the table; of its lock */
    struct rs_watch *watches;  /* of the lock of rs_epoll.c */
    /* of the lock */
    pthread_mutex_t lock;
    int cancel_state; /* of the thread that has the lock */
    int domain;
    bool is_nonblocking, is_closed, is_bound;
    enum rs_phase phase;
    int error; /* of connecting, not told yet */
    struct rdma_event_channel *channel;
    struct rdma_cm_id *id;
    struct rs_options options;
    void *route; /* paths, to use instead of resolving them */
    size_t route_size;
    /* a connection */
    bool is_established, is_gone;
    struct rs_stream stream; /* from RS_HAS_STREAM on */
    struct ibv_pd *pd;
    struct ibv_comp_channel *comp_channel;
    struct ibv_cq *cq;
    uint8_t *memory; /* control memory, then the two rings */
    size_t memory_size;
    struct ibv_mr *control, *receiving, *sending;
    struct rs_mapped *mapped;
    double last_heard; /* seconds of rdmacm_now(): when something has arrived, or a probe was sent */
    struct rs_datagram *datagram; /* of SOCK_DGRAM, which has no id and stays in RS_IDLE; else NULL */
};

/* -- sockets (rs_socket.c) ----------------------------------------------------------------------------------------- */

/* A socket on a new channel, not in the table yet; NULL with errno. */
struct rs_socket *rs_new(int domain);
/* Whether an address is one of the socket's domain. */
bool rs_is_right(const struct rs_socket *rs, const struct sockaddr *address, socklen_t length);
/* Put it into the table; -1 with errno. */
int rs_add(struct rs_socket *rs);
/* The socket of a descriptor, for a call, with the lock; NULL with EBADF. */
struct rs_socket *rs_enter(int fd);
/* The same for rpoll(); NULL: an ordinary descriptor. */
struct rs_socket *rs_find(int fd);
void rs_leave(struct rs_socket *rs);
/* The same without the lock. */
void rs_release(struct rs_socket *rs);
/* The calls of a thread are not cancelled while it has the lock. */
void rs_lock(struct rs_socket *rs);
void rs_unlock(struct rs_socket *rs);
/* One more user, where it cannot go meanwhile. */
void rs_hold(struct rs_socket *rs);
/* Close a number, with the lock; false: it is the last one, which is left. */
bool rs_close_number(struct rs_socket *rs, int number);
/* Take it out of the table, with the lock: the last call that has it frees it. */
void rs_remove(struct rs_socket *rs);

/* -- connections (rs_connection.c); with the lock -------------------------------------------------------------------- */

/* Do what there is to do; whether anything has happened. */
bool rs_progress(struct rs_socket *rs);
/* The connection is over. */
void rs_end(struct rs_socket *rs);
/* Make the request of an event a connection; NULL: it was refused, or `code` is an errno. */
struct rs_socket *rs_accept(struct rs_socket *listener, int *code);
/* Everything of the connection, and the id. */
void rs_destroy(struct rs_socket *rs);
bool rs_has_request(const struct rs_socket *rs);

/* -- waiting (rs_poll.c) --------------------------------------------------------------------------------------------- */

typedef bool rs_condition(struct rs_socket *rs);
rs_condition rs_is_readable, rs_is_writable;

/* Wait for a condition, with the lock, which is left meanwhile; 0 or an errno: EAGAIN, EINTR, EBADF. `deadline` is one
 * of rdmacm_now(); 0: none. */
int rs_wait(struct rs_socket *rs, rs_condition *is_met, bool is_nonblocking, double deadline);
/* Whether a call with flags waits. */
static inline bool rs_is_patient(const struct rs_socket *rs, int flags) {
    return !rs->is_nonblocking && !(flags & MSG_DONTWAIT);
}
/* When a call that begins now has waited for long enough. */
double rs_deadline(const struct timeval *timeout);
/* Other threads look again. */
void rs_wake(void);
/* Do what there is to do, and have what comes next make a descriptor readable; the events that there are, with the
 * lock. */
uint32_t rs_look(struct rs_socket *rs);
/* The descriptor that tells of work beside that of the channel; -1: there is none. */
int rs_second_descriptor(const struct rs_socket *rs);
/* How long to sleep, in milliseconds; -1: for ever, which is a deadline of 0. */
int rs_milliseconds_to(double deadline);

/* -- epoll (rs_epoll.c); with the lock ------------------------------------------------------------------------------- */

/* Something was done for a socket, or has changed: who waits for edges is told of `has_news` only. */
void rs_tell(struct rs_socket *rs, bool has_news);
/* The descriptor of its channel has another number now. */
void rs_renumber(struct rs_socket *rs, int before);
/* It is closed. */
void rs_unwatch(struct rs_socket *rs);
/* Another number of an epoll, or one is closed; -1 with EBADF: it is none. */
int rs_epoll_alias(int fd, int number);
int rs_epoll_close(int fd);

/* Exported functions that others here call. */
int rdma_listen(struct rdma_cm_id *id, int backlog);
int rdma_connect(struct rdma_cm_id *id, struct rdma_conn_param *param);
int rdma_accept(struct rdma_cm_id *id, struct rdma_conn_param *param);
int rdma_reject(struct rdma_cm_id *id, const void *data, uint8_t length);
int rdma_disconnect(struct rdma_cm_id *id);
int rdma_notify(struct rdma_cm_id *id, enum ibv_event_type event);
int ibv_dealloc_pd(struct ibv_pd *pd);
struct ibv_mr *(ibv_reg_mr)(struct ibv_pd *pd, void *address, size_t length, int access);
int ibv_dereg_mr(struct ibv_mr *mr);
struct ibv_ah *ibv_create_ah(struct ibv_pd *pd, struct ibv_ah_attr *attributes);
int ibv_destroy_ah(struct ibv_ah *ah);
int ibv_get_cq_event(struct ibv_comp_channel *channel, struct ibv_cq **cq, void **context);
void ibv_ack_cq_events(struct ibv_cq *cq, unsigned int count);

#endif
