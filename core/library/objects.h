/* The objects of libibverbs: the public structure, and what is behind it. One mutex, rdmacm_enter(), guards them all. */
#ifndef RDMACM_OBJECTS_H
#define RDMACM_OBJECTS_H

#include "library.h"

#define CONTAINER(pointer, type, member) ((type *)(void *)((char *)(pointer) - offsetof(type, member)))

struct device {
    struct ibv_device ibv;
    unsigned holders; /* lists, and open contexts, which keep it when the list is freed */
    struct run_device info;
    struct run_gid *gids; /* info.gids_count */
};

struct context {
    struct device *device;
    struct rdmacm_addresses addresses; /* that datagrams are accepted at */
    int report_fd;                     /* the other end of async_fd, which asynchronous events are written to */
    uint32_t server_number;            /* of RUN_CONTEXT_OPEN; 0: none */
    struct verbs_context verbs;        /* the last: programs see its last member */
};

struct pd {
    struct ibv_pd ibv;
    uint64_t number;
    unsigned uses; /* objects that belong to it */
};

struct mr {
    struct ibv_mr ibv;
    struct pd *pd;
    uint64_t iova;
    uint32_t access;
};

struct mw {
    struct ibv_mw ibv;
    struct rdmacm_window window;
    struct pd *pd;
};

struct channel {
    struct ibv_comp_channel ibv;
    int report_fd; /* the other end of its descriptor */
};

enum { NOT_ARMED, ARMED_SOLICITED, ARMED };

struct cq {
    union {
        struct ibv_cq ibv;
        struct ibv_cq_ex ex;
    };
    struct rdmacm_cq core;
    int armed;
    bool waited;    /* whether an event was fetched: its completions are polled without sending ACKs first */
    bool told_overrun;
    size_t announced; /* so many of the first entries were there when an event was reported */
    unsigned uses;  /* queue pairs */
    uint32_t comp_events; /* that were fetched */
    struct rdmacm_entry current; /* of start_poll and next_poll */
};

struct srq {
    struct ibv_srq ibv;
    struct rdmacm_srq core;
    struct pd *pd;
    struct xrcd *xrcd; /* NULL: it is no queue of XRC */
    struct cq *cq;     /* of XRC */
    uint32_t number;
    size_t max_sge;
    unsigned uses;
    bool is_listed; /* by srqs_revoke() */
    struct srq *next;
};

struct xrcd {
    struct ibv_xrcd ibv;
    struct rdmacm_table queues; /* of struct rdmacm_srq, by number */
    unsigned uses, opened;
    dev_t device; /* of the file that names it */
    ino_t inode;
    struct xrcd *next;
};

struct ah {
    struct ibv_ah ibv;
    struct pd *pd;
    unsigned uses; /* 1 of the program, and those of requests; atomic */
    struct rdmacm_route route;
    struct rdmacm_flow flow;
};

struct qp {
    union {
        struct ibv_qp ibv;
        struct ibv_qp_ex ex;
    };
    union {
        struct rdmacm_rc rc;
        struct rdmacm_ud ud;
    };
    union {
        struct rdmacm_conn connection;
        struct rdmacm_ud_end end;
    };
    struct rdmacm_conn *conn; /* that of either */
    struct slot *slot;
    struct pd *pd;
    struct srq *srq;
    struct xrcd *xrcd;
    struct ibv_qp_cap cap;
    struct ibv_qp_attr attr; /* as they were set */
    bool signals_all;
    bool has_told_hole;
    bool is_draining; /* listed by process_drain() */
    unsigned groups; /* that it is attached to */
    struct batch *batch; /* requests between wr_start and wr_complete */
    struct device_counters *counters; /* NULL: none */
    struct qp *next_draining;
};

/* What is kept of a request until its completion is polled. */
struct pin {
    struct rdmacm_pin listed; /* the first member */
    uint64_t wr_id;
    struct ah *ah;
    struct rdmacm_bind bind;
    struct rdmacm_element elements[];
};

static inline struct context *context_of(struct ibv_context *ibv) {
    return CONTAINER(ibv, struct context, verbs.context);
}
static inline struct pd *pd_of(struct ibv_pd *ibv) { return (struct pd *)ibv; }
static inline struct cq *cq_of(struct ibv_cq *ibv) { return (struct cq *)ibv; }
static inline struct qp *qp_of(struct ibv_qp *ibv) { return (struct qp *)ibv; }
static inline struct srq *srq_of(struct ibv_srq *ibv) { return (struct srq *)ibv; }

/* -- the wire of the process (process.c) ------------------------------------------------------------------------------ */

/* A range of queue pair numbers with its sockets. */
struct slot {
    struct slot *next;
    uint32_t first_qpn, count, used, last;
    int fds[2]; /* of IPv4, of IPv6; -1: none */
};

/* The wire, which is made, with its first slot, at the first call; NULL with errno. Not with the mutex. */
struct rdmacm_wire *process_wire(void);
extern struct rdmacm_regions process_regions;
/* A new number, with its slot; 0 with errno. Not with the mutex. */
uint32_t process_take_number(struct slot **slot);
/* It is free again. With the mutex. */
void process_give_number(struct slot *slot, uint32_t qp_num);
/* Unpredictable bytes. */
void process_random(void *bytes, size_t count);
/* What the engines have left to do after a call: reports of completions and errors. With the mutex. */
void process_settle(struct rdmacm_wire *wire);
/* Let the peers make progress, for a caller that polls. With the mutex; whether something has arrived. */
bool process_poll(struct rdmacm_wire *wire, const struct rdmacm_cq *queue);
/* Tell the program when a queue pair in SQD is drained. With the mutex. */
void process_drain(struct qp *qp);
/* It goes away. With the mutex. */
void process_end_drain(struct qp *qp);

/* Requests of all queue pairs do not touch memory any more that a key does not stand for. With the mutex. */
void process_revoke(uint32_t key);
/* The same of shared receive queues (shared_queue.c). */
void srqs_revoke(uint32_t key);
/* In a child of fork(2): they are the parent's. */
void srqs_forget(void);

/* -- counters that the server can read (counters.c) -------------------------------------------------------------------- */

enum { MOST_COUNTED_DEVICES = 16 };

/* src/rdmacm/run/counting.py has the same layout. */
struct shared_counters {
    struct rdmacm_tally tally;
    struct device_counters {
        uint32_t index; /* of the device; 0: the row is free */
        uint32_t reserved;
        uint64_t counts[RDMACM_COUNTS];
        uint64_t refused[RDMACM_REFUSALS];
    } devices[MOST_COUNTED_DEVICES];
};

/* Let the wire count where the server can read it, unless that is refused. Not with the mutex. */
void counters_start(struct rdmacm_wire *wire);
/* In a child of fork(2). */
void counters_forget(void);
/* The row of a device; NULL where there is none. With the mutex. */
struct device_counters *counters_of(uint32_t index);

/* -- between the wire and the sockets, where the server wants it (tap.c, faults.c) -------------------------------------- */

/* Pass all packets on to the server. False if that is refused. Not with the mutex. */
bool tap_start(void);
void tap_sends(struct rdmacm_wire *wire, const struct rdmacm_route *route, const struct rdmacm_datagram *datagram);
void tap_has_read(struct rdmacm_wire *wire, const struct rdmacm_received *from);
/* Lose packets, or hold them up; whether any are. */
bool faults_start(const struct run_welcome *welcome);
/* In a child of fork(2). */
void faults_forget(void);
/* Whether the datagram was sent, in parts, or held up. */
bool faults_take(struct rdmacm_wire *wire, int fd, const struct rdmacm_route *route,
                 const struct rdmacm_datagram *datagram);

/* -- calls of one file that another needs ------------------------------------------------------------------------------ */

/* Write an asynchronous event for the program to fetch. With the mutex. */
void report_async(struct ibv_context *context, const struct ibv_async_event *event);
/* Completions were added to a queue. With the mutex. */
void report_completions(struct cq *cq);
/* A queue pair has failed. With the mutex. */
void qp_failed(struct qp *qp);
/* Tell the server, once, if a queue pair has failed as long packets do not arrive. Not with the mutex. */
void qp_tell_hole(uint32_t qp_num);
/* Whether a queue pair in SQD has requests that had begun. With the mutex. */
bool qp_is_draining(const struct qp *qp);
/* Free a request's pin. */
void pin_free(struct pin *pin);
/* Drop all entries of a completion queue that are of a queue pair. With the mutex. */
void cq_drop(struct cq *cq, uint32_t qp_num);
/* An address of 4 or 16 bytes in a GID: how many; `address` points into the GID. */
size_t gid_address(const union ibv_gid *gid, const uint8_t **address);
/* A route to the GID of an address vector, from that of its index; 0 or an errno. Not with the mutex. */
int route_of(struct ibv_context *context, const struct ibv_ah_attr *attr, struct rdmacm_route *route, uint8_t *local,
             uint8_t *remote, size_t *length, uint32_t *scope);

int verbs_post_send(struct ibv_qp *qp, struct ibv_send_wr *wr, struct ibv_send_wr **bad);
int verbs_post_recv(struct ibv_qp *qp, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad);
int verbs_post_srq_recv(struct ibv_srq *srq, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad);
int verbs_poll_cq(struct ibv_cq *cq, int count, struct ibv_wc *wc);
int verbs_req_notify_cq(struct ibv_cq *cq, int solicited_only);
struct ibv_cq_ex *verbs_create_cq_ex(struct ibv_context *context, struct ibv_cq_init_attr_ex *attr);
struct ibv_qp *verbs_create_qp_ex(struct ibv_context *context, struct ibv_qp_init_attr_ex *attr);
struct ibv_qp *verbs_open_qp(struct ibv_context *context, struct ibv_qp_open_attr *attr);
struct ibv_srq *verbs_create_srq_ex(struct ibv_context *context, struct ibv_srq_init_attr_ex *attr);
int verbs_get_srq_num(struct ibv_srq *srq, uint32_t *number);
struct ibv_xrcd *verbs_open_xrcd(struct ibv_context *context, struct ibv_xrcd_init_attr *attr);
int verbs_close_xrcd(struct ibv_xrcd *xrcd);
struct ibv_mw *verbs_alloc_mw(struct ibv_pd *pd, enum ibv_mw_type type);
int verbs_bind_mw(struct ibv_qp *qp, struct ibv_mw *mw, struct ibv_mw_bind *bind);
int verbs_dealloc_mw(struct ibv_mw *mw);
int verbs_query_device_ex(struct ibv_context *context, const struct ibv_query_device_ex_input *input,
                          struct ibv_device_attr_ex *attr, size_t size);
int verbs_query_port(struct ibv_context *context, uint8_t port, struct ibv_port_attr *attr, size_t size);
/* Whether requests of an opcode can be posted. */
bool qp_has_opcode(const struct qp *qp, enum ibv_wr_opcode opcode);
/* Set the functions wr_*() of a queue pair; 0, EOPNOTSUPP where it does not have an operation, or ENOMEM. */
int qp_set_builders(struct qp *qp, uint64_t operations);
void qp_free_builders(struct qp *qp);

/* Exported functions that others here call. */
struct ibv_pd *ibv_alloc_pd(struct ibv_context *context);
int ibv_destroy_qp(struct ibv_qp *qp);
int ibv_query_gid(struct ibv_context *context, uint8_t port, int index, union ibv_gid *gid);
struct ibv_context *ibv_open_device(struct ibv_device *device);
struct ibv_device **ibv_get_device_list(int *count);
void ibv_free_device_list(struct ibv_device **list);

#endif
