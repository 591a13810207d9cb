/* What the glue files share: they alone know Python, with the limited API of 3.11. */
#ifndef RDMACM_MODULE_H
#define RDMACM_MODULE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

#include "rdmacm_core.h"
#include "rdmacm_wire.h"

#define MODULE_NAME "rdmacm.proto._core"

/* What keeps an element of memory alive: a region, or a buffer. */
struct hold {
    struct pin *region; /* NULL: the buffer */
    Py_buffer view;
};

/* What keeps the memory of a request, or of a region, alive. */
struct pin {
    struct rdmacm_pin link;
    PyObject *owner; /* the SendWork or RecvWork of a request, the protection domain of a region; NULL: see wr_id */
    PyObject *wr_id; /* of a request that was made of the user's directly, without such an object */
    PyObject *route; /* of a datagram; else NULL */
    struct rdmacm_bind *bind; /* of a BIND_MW; else NULL */
    size_t uses;     /* of a region: itself, and the requests that use it */
    bool unsignaled; /* whether its success makes no completion, as its maker has asked */
    struct rdmacm_memory memory;
    struct rdmacm_element *elements; /* those of `memory`, behind the holds */
    struct hold holds[];             /* one for each */
};

typedef struct {
    PyObject_HEAD
    struct rdmacm_regions regions;
} Regions;

/* What a memory window is bound to. */
typedef struct {
    PyObject_HEAD
    struct rdmacm_window window;
    PyObject *owner; /* the Regions */
    PyObject *pd;
} Window;

/* What engines have in lists and what they refer to. */
#define ENGINE_OBJECTS(DO) DO(completed) DO(srqns) DO(counters) DO(regions) DO(pd) DO(shared) DO(domain)
#define DECLARE_OBJECT(name) PyObject *name;

/* ConnectedEngine and UdEngine. */
typedef struct {
    PyObject_HEAD
    union {
        struct rdmacm_queues queues;
        struct rdmacm_rc rc;
        struct rdmacm_ud ud;
    };
    /* `completed` are the WCs that the owner has not taken, `counters` is of type EngineCounters, `regions` of type
     * Regions, and `shared` of type SharedReceives, or NULL. An XRC target has a `domain` of type XrcDomain, and `srqns`
     * has for each of `completed` the number of its shared receive queue. */
    ENGINE_OBJECTS(DECLARE_OBJECT)
    size_t address_length; /* 0: not set */
    uint8_t local[16], remote[16];
    bool is_shared; /* whether a wire uses it, perhaps in a thread without the interpreter's lock, but with the mutex */
} Engine;

/* enter_core() if the wire may use it now; whether that was done. */
bool enter_shared(const bool *is_shared);
void leave_shared(bool is_entered);
/* Do a step of an engine with the mutex if the wire may use it now. */
#define ENGINE_DO(self, ...)                                                                                           \
    do {                                                                                                               \
        bool is_entered = enter_shared(&(self)->is_shared);                                                            \
        __VA_ARGS__;                                                                                                   \
        leave_shared(is_entered);                                                                                      \
    } while (0)
/* A getter of an engine. */
#define ENGINE_GETTER(name, type, value, convert)                                                                      \
    static PyObject *name(Engine *self, void *Py_UNUSED(closure)) {                                                    \
        type found;                                                                                                    \
        ENGINE_DO(self, found = (value));                                                                              \
        return convert(found);                                                                                         \
    }

/* How packets to an address are sent. */
typedef struct {
    PyObject_HEAD
    struct rdmacm_route route;
    struct rdmacm_flow flow;
    PyObject *wire;  /* the Wire whose sockets it is for */
    PyObject *owner; /* what Python has of it */
} Route;

/* The lock of a runtime. */
typedef struct {
    PyObject_HEAD
    struct rdmacm_lock lock;
} Lock;

typedef struct {
    PyObject_HEAD
    struct rdmacm_wire *wire; /* NULL in a child of fork(2) */
    Lock *lock;
    PyObject *on_events; /* called without arguments when there is something to take */
    PyObject *sleepers;  /* is not empty while threads wait: then on_events is called for each completion */
    bool is_processing;  /* whether Python processes what has arrived: nothing is read meanwhile */
    bool is_background;  /* whether the helper thread makes progress: the thread of the core does not wait for it */
    double progress_due; /* when the next poll is Python's, in seconds */
    int signal_fd; /* -1: not open */
} Wire;

/* The completions that a queue has. */
typedef struct {
    PyObject_HEAD
    struct rdmacm_cq cq;
    Wire *wire;      /* NULL: it has none */
    PyObject *owner; /* what take_added() returns for it, or NULL */
    bool waited;     /* see SoftCQ */
} CompletionQueue;

extern PyTypeObject *lock_type, *queue_type, *wire_type;

/* Take a lock; with the interpreter's lock released while it waits. */
void take_lock(Lock *lock);

/* Take the mutex of the core for a few steps, with the interpreter's lock. No call of Python and no drop_pin() comes
 * before rdmacm_leave(). If another thread has it, the interpreter's lock is released before this returns. */
void enter_core(void);
/* Such steps. */
#define CORE_DO(...)                                                                                                   \
    do {                                                                                                               \
        enter_core();                                                                                                  \
        __VA_ARGS__;                                                                                                   \
        rdmacm_leave();                                                                                                \
    } while (0)
/* Release the interpreter's lock, and then take the mutex, for work with system calls; and the other way round. */
PyThreadState *begin_core(void);
void end_core(PyThreadState *state);

/* What Python has to see to. */
struct seen {
    struct rdmacm_pin *finished;
    bool has_added, has_work;
};

/* Take notes of it. The mutex is held. */
void look_events(Wire *self, struct seen *seen);
/* Tell Python, if there is anything. False with an exception. */
bool see_events(Wire *self, const struct seen *seen);

enum { POLLED_NOTHING, POLLED, POLL_IN_PYTHON };
/* Make progress for a caller that polls `queue`, if that is empty, and take what it has then, at most `most`. The
 * runtime's lock is held. */
int poll_wire(Wire *self, struct rdmacm_cq *queue, struct seen *seen, struct rdmacm_entry *entries, size_t most,
              size_t *count);
/* Send the ACKs that wait. The runtime's lock is held. */
void acknowledge(Wire *self);

extern PyTypeObject *regions_type, *connected_type, *ud_engine_type, *route_type, *shared_type, *domain_type;
/* The members of WCStatus, by value. */
extern PyObject *wc_statuses;
/* The class of address handles. */
extern PyObject *ah_class;
/* The class of the wr_id of a request without a completion. */
extern PyObject *unsignaled_class;

/* A pin that has no memory yet, and room for `most` elements. NULL with an exception. */
struct pin *make_pin(PyObject *owner, size_t most);
/* Add a buffer. False with an exception. */
bool pin_buffer(struct pin *pin, PyObject *exporter, int flags);
/* Add memory of a region. */
void pin_region(struct pin *pin, struct pin *region, uint8_t *data, uint32_t length, uint32_t lkey);
void drop_pin(void *pin);
/* That of a request with `segments`; NULL without an exception where the core does not take it. */
struct pin *pin_segments(PyObject *work, int flags);
/* The same of a RecvWork, whose elements get the keys that it has. */
struct pin *pin_recv_work(PyObject *work);
/* Drop the pin of a request that was refused. Whether it was kept. */
bool keep_pin(struct pin *pin, bool is_kept);
/* What the collector visits. Not the buffer: it would clear a memoryview that is in use, which CPython does not
 * survive. A buffer that is in use is kept instead, and so is what it refers to. */
static inline PyObject *owner_of(const void *pin) { return ((const struct pin *)pin)->owner; }
/* Read what only a request on a memory window has; its pin keeps it. False, perhaps with an exception, if it is wrong. */
bool pin_bind(struct pin *pin, PyObject *work, struct rdmacm_send *send);
/* A view of part of a region's memory. */
PyObject *view_of_region(const struct pin *region, const uint8_t *data, uint64_t length);

/* The methods of Regions for memory windows. `qp` stands for a queue pair. */
#define WINDOW_METHODS                                                                                                 \
    {"allocate_window", (PyCFunction)regions_allocate_window, METH_VARARGS,                                            \
     "allocate_window(pd, is_type_2, key): a Window that is not bound."},                                              \
    {"bind", (PyCFunction)regions_bind, METH_VARARGS, "bind(pd, qp, bind): whether a Bind is allowed, and was done."}, \
    {"invalidate", (PyCFunction)regions_invalidate, METH_VARARGS,                                                      \
     "invalidate(pd, qp, rkey): whether a window of type 2 was unbound."},                                             \
    {"free_windows", (PyCFunction)regions_free_windows, METH_VARARGS,                                                  \
     "free_windows(qp): unbind those of type 2 that it has bound."},                                                   \
    {"find_window", (PyCFunction)regions_find_window, METH_VARARGS,                                                    \
     "find_window(pd, qp, rkey, address, length, access): the bytes that a peer names, or None."},                     \
    {"bound", (PyCFunction)regions_bound, METH_VARARGS, "bound(key): how many windows are bound to a region."}
PyObject *regions_allocate_window(Regions *self, PyObject *args);
PyObject *regions_bind(Regions *self, PyObject *args);
PyObject *regions_invalidate(Regions *self, PyObject *args);
PyObject *regions_free_windows(Regions *self, PyObject *args);
PyObject *regions_find_window(Regions *self, PyObject *args);
PyObject *regions_bound(Regions *self, PyObject *args);

/* What an engine has built last. Too large for a stack. One call at a time uses it, because it keeps the interpreter's
 * lock. */
extern struct rdmacm_out built;
/* A datagram of an engine that has no wire. */
struct made {
    PyObject *route; /* NULL of a connection, which has one route */
    PyObject *bytes;
    Py_ssize_t segment;
};
/* Copy those of `built`; return how many, with an exception if that is not all. To make bytes runs no other code, so the
 * mutex may be held. */
size_t copy_datagrams(PyObject *route, struct made *made);
/* The bytes of the first. */
PyObject *copy_datagram(void);
/* A list of ([bytes], segment), or of (route, [bytes], segment), if these are all of them. Their references end. */
PyObject *list_datagrams(const struct made *made, size_t count, bool is_complete);

/* Move completions out of an engine, before anything else can: `moved` of them to memory that PyMem_Free() frees. NULL
 * if there are none. Without memory they stay. */
struct rdmacm_completion *move_completions(struct rdmacm_completions *completions, size_t *moved);
/* Append the WCs of those that were moved to a list, and free them. False with an exception. */
bool append_wcs(PyObject *completed, struct rdmacm_completion *completions, size_t count, uint32_t qp_num);
/* The number that its request was posted with: a new reference. */
PyObject *wr_id_of(const struct pin *pin);

/* -- engines of queue pairs ------------------------------------------------------------------------------------------ */

/* What an engine has completed and counted. */
struct results {
    struct rdmacm_completion *completions;
    size_t completions_count;
    bool has_counts;
    struct rdmacm_counts counts;
    uint32_t refused[RDMACM_REFUSALS];
};

/* Take them, in the same step as the call that made them. */
void collect(Engine *self, struct results *results);
/* Pass them on to Python. False with an exception. */
bool pass_on(Engine *self, struct results *results);
/* End a call that returns nothing; or that returns a list, which is taken over. */
PyObject *pass_on_none(Engine *self, struct results *results);
PyObject *pass_on_list(Engine *self, struct results *results, PyObject *list);
/* End the call that posts a request: it is done, or the core has set the exception of what was wrong. */
PyObject *pass_on_posted(Engine *self, struct results *results, bool is_done);
/* Refer to the memory that requests name, and to a shared receive queue, its SharedReceives, or None: then receives come
 * from a queue of its own. False with an exception. */
bool engine_set(Engine *self, PyObject *memory, PyObject *shared, PyObject *counters);
/* Their common methods, fields and slots. */
#define METHOD(name, flags) {#name, (PyCFunction)engine_##name, flags, NULL}
#define ENGINE_METHODS                                                                                                 \
    METHOD(post_recv, METH_O), METHOD(look_up_again, METH_VARARGS), METHOD(pause, METH_NOARGS),                        \
        METHOD(resume, METH_NOARGS), METHOD(flush, METH_NOARGS)
#define FIELD(name, of, kind, flags) {#name, kind, offsetof(Engine, of.name), flags, NULL}
#define ENGINE_FIELDS                                                                                                  \
    {"completed", T_OBJECT, offsetof(Engine, completed), READONLY, NULL},                                              \
        {"counters", T_OBJECT, offsetof(Engine, counters), READONLY, NULL}, FIELD(failed, queues, T_BOOL, 0),          \
        FIELD(send_failed, queues, T_BOOL, READONLY), FIELD(qp_num, queues, T_UINT, READONLY)
#define ENGINE_SLOTS                                                                                                   \
    SLOT(tp_new, engine_new), SLOT(tp_traverse, engine_traverse), SLOT(tp_clear, engine_clear),                        \
        SLOT(tp_dealloc, engine_dealloc), SLOT(tp_members, engine_members), SLOT(tp_getset, engine_getset),            \
        SLOT(tp_methods, engine_methods)
PyObject *engine_post_recv(Engine *self, PyObject *work);
PyObject *engine_look_up_again(Engine *self, PyObject *args);
PyObject *engine_pause(Engine *self, PyObject *ignored);
PyObject *engine_resume(Engine *self, PyObject *ignored);
PyObject *engine_flush(Engine *self, PyObject *ignored);
int engine_traverse(Engine *self, visitproc visit, void *arg);
int engine_clear(Engine *self);
void engine_dealloc(Engine *self);

/* Names in EngineCounters.dropped. */
extern const char *const refusal_names[RDMACM_REFUSALS];
/* A list of (counter, name, count) as EngineCounters.add() takes it. */
PyObject *list_counts(const struct rdmacm_counts *counts);
/* Take those of a queue pair. The mutex is held. */
struct rdmacm_counts pop_counts(struct rdmacm_queues *queues);

/* -- requests that are posted directly ------------------------------------------------------------------------------- */

/* What a queue pair allows. */
struct rules {
    const struct rdmacm_regions *regions;
    uint64_t pd;
    size_t max_send_wr, max_recv_wr, max_inline;
    size_t max_send_sge, max_recv_sge;
    bool signals_all;
};

/* The receives of a shared receive queue. */
typedef struct {
    PyObject_HEAD
    struct rdmacm_srq srq;
    struct rules rules;
    PyObject *pd, *regions; /* what `rules` refers to */
    Wire *wire;     /* its lock is the runtime's; NULL: it has none, and nothing is posted directly */
    bool is_shared; /* whether a connection of a wire has taken from it */
} SharedReceives;

/* The shared receive queues of an XRC domain. */
typedef struct {
    PyObject_HEAD
    struct rdmacm_table queues; /* of struct rdmacm_srq, by number */
    PyObject *members; /* a dict of what these are of, and of their completion queues */
    PyObject *regions; /* of type Regions: of their device */
} XrcDomain;

/* Local memory as a request names it: a part of a region, or bytes that cannot change. */
struct local {
    PyObject *bytes; /* borrowed; NULL: the fields below */
    uint64_t address, length, lkey;
};

/* A SendWR, or a RecvWR without opcode and flags. */
struct request {
    uint64_t opcode, flags;
    PyObject *wr_id;
    size_t count; /* of its elements */
    struct local locals[RDMACM_MOST_ELEMENTS];
    PyObject *elements[RDMACM_MOST_ELEMENTS];
};

/* A number. False where it is none, negative, or larger than `most`. */
bool number_of(PyObject *value, uint64_t most, uint64_t *number);
/* The same from an attribute. */
bool read_number(PyObject *object, PyObject *name, uint64_t most, uint64_t *number);
bool read_uint32(PyObject *object, PyObject *name, uint32_t most, uint32_t *number);
/* Whether an attribute is true. False with an exception. */
bool read_truth(PyObject *object, PyObject *name, bool *truth);
/* False if it is not one of those that the core takes. end_request() comes after either result. */
bool parse_send(PyObject *object, struct request *request);
bool parse_recv(PyObject *object, struct request *request);
void end_request(struct request *request);
/* Read the fields that the opcode of a request on a connection has; `imm` is the attribute with immediate data. False,
 * perhaps with an exception, if one is wrong. */
bool read_fields(PyObject *object, PyObject *imm, bool is_xrc, struct rdmacm_send *send);
/* What the flags of a request of the send queue mean. False if it is not one of those that the core takes. */
bool parse_flags(const struct rules *rules, uint64_t flags, size_t elements, bool *solicited, bool *unsignaled);
/* `length` bytes from byte `offset` of an MR on, or with None the rest. False outside of it. */
bool local_of_region(PyObject *region, PyObject *offset, PyObject *length, struct local *local);
/* Find the memory of a request of the send queue, which has `count` elements, and make its pin. NULL if the core does not
 * take it. */
struct pin *pin_data(const struct rules *rules, PyObject *wr_id, const struct local *locals, size_t count,
                     uint64_t flags, bool is_written);
/* The same of a receive. */
struct pin *pin_receive(const struct rules *rules, PyObject *wr_id, const struct local *locals, size_t count);
typedef struct queue_pair QueuePair;

/* Post a request, or the first ones of a list; return how many. */
Py_ssize_t post_all(void *self, PyObject *requests, bool (*post)(void *self, PyObject *request));
/* What is left of requests: None, the same, or the end of a list. */
PyObject *rest_of(PyObject *requests, Py_ssize_t done);
/* The address and the ancillary data of packets. False with an exception. */
bool set_route(struct rdmacm_route *route, const uint8_t *remote, bool is_ipv6, uint16_t port, uint32_t scope,
               PyObject *control, Py_ssize_t train);

/* -- queue pairs of a wire ------------------------------------------------------------------------------------------- */

/* The first part of Connection and of Datagrams. */
struct queue_pair {
    PyObject_HEAD
    struct rdmacm_conn *conn; /* its own */
    /* Queue a SendWR. False, with nothing done, if it is not one of those that the core takes. */
    bool (*post_send)(void *queue_pair, PyObject *request);
    Wire *wire;
    Engine *core; /* NULL once it is detached */
    PyObject *qp;   /* of type SoftQP or SoftUdQP */
    PyObject *send_queue, *recv_queue;
    PyObject *addresses; /* of type Addresses, of a datagram queue pair */
    struct rules rules;
};

/* Borrowed references. */
struct queue_pair_parts {
    Wire *wire;
    Engine *core;
    PyObject *qp, *send_queue, *recv_queue;
    PyObject *limits; /* of its requests, a tuple: see queue_pair_join() */
};

/* Whether so many requests may be queued here, and the send queue has room for them. */
bool queue_pair_has_room(const QueuePair *self, size_t count);
/* Send what was posted. False with an exception. */
bool queue_pair_posted(QueuePair *self, Py_ssize_t count);
/* Become a queue pair of its wire, when `post_send` and the fields of `conn` for connections or for datagrams are set. False
 * with an exception. */
bool queue_pair_join(QueuePair *self, const struct queue_pair_parts *parts);
/* Their methods, but post_part(), and their slots. */
#define QUEUE_PAIR_METHODS                                                                                             \
    {"post_send", (PyCFunction)queue_pair_post_send, METH_O,                                                           \
     "post_send(requests): post and send a SendWR or a list of them; what is left to Python, None: nothing."},         \
    {"post_recv", (PyCFunction)queue_pair_post_recv, METH_O, "post_recv(requests): the same for RecvWR."},             \
    {"post_recv_part", (PyCFunction)(void (*)(void))queue_pair_post_recv_part, METH_FASTCALL,                          \
     "post_recv_part(wr_id, region, offset, length): a receive into part of an MR; False if it was not taken."},       \
    {"take_posted_counts", (PyCFunction)queue_pair_take_posted_counts, METH_NOARGS,                                    \
     "Requests posted less those completed here since the last call: of the send queue, of the receive queue."},       \
    {"take_counts", (PyCFunction)queue_pair_take_counts, METH_NOARGS, "What was counted, as EngineCounters.add() takes it."},                \
    {"detach", (PyCFunction)queue_pair_detach, METH_NOARGS, "Leave the wire."}
#define QUEUE_PAIR_SLOTS                                                                                               \
    SLOT(tp_traverse, queue_pair_traverse), SLOT(tp_clear, queue_pair_clear), SLOT(tp_dealloc, queue_pair_dealloc)
PyObject *queue_pair_post_send(QueuePair *self, PyObject *requests);
PyObject *queue_pair_post_recv(QueuePair *self, PyObject *requests);
PyObject *queue_pair_post_recv_part(QueuePair *self, PyObject *const *args, Py_ssize_t count);
PyObject *queue_pair_take_posted_counts(QueuePair *self, PyObject *ignored);
PyObject *queue_pair_take_counts(QueuePair *self, PyObject *ignored);
PyObject *queue_pair_detach(QueuePair *self, PyObject *ignored);
int queue_pair_traverse(QueuePair *self, visitproc visit, void *arg);
int queue_pair_clear(QueuePair *self);
void queue_pair_dealloc(QueuePair *self);

/* The names of attributes: `names.addr` is a string, and so on. */
#define FOR_NAMES(DO)                                                                                                  \
    DO(_closed) DO(access) DO(addr) DO(ah) DO(base) DO(bind) DO(binding) DO(compare_add) DO(core_route) DO(dest_qpn)   \
    DO(destination) DO(fence) DO(flush) DO(icrc) DO(imm) DO(imm_data) DO(invalidate_rkey) DO(is_ipv6) DO(length)       \
    DO(lkey) DO(lkeys) DO(number) DO(opcode) DO(pd) DO(qkey) DO(qp_num) DO(region) DO(remote_addr) DO(remote_qkey)     \
    DO(remote_qpn) DO(remote_srqn) DO(rkey) DO(route) DO(segments) DO(signaled) DO(solicited) DO(source) DO(swap)      \
    DO(window) DO(work) DO(wr_id)
#define DECLARE_NAME(name) PyObject *name;
extern struct names {
    FOR_NAMES(DECLARE_NAME)
} names;

/* A type of the module: a new reference, NULL with an exception. Instances have the structure of that name. */
#define ADD_TYPE(module, structure, flags, slots)                                                                      \
    add_type(module, MODULE_NAME "." #structure, sizeof(structure), flags, slots)
PyTypeObject *add_type(PyObject *module, const char *name, size_t size, unsigned long flags, PyType_Slot *slots);
#define SLOT(name, value) {Py_##name, (void *)(uintptr_t)(value)}
/* A new object, whose fields are 0. NULL with an exception. */
void *new_object(PyTypeObject *type);
/* Replace an object by a new reference to another. */
void set_object(PyObject **place, PyObject *object);
/* Replace `count` objects, whose places follow, by the arguments of a function: None, or NULL with an exception. */
PyObject *set_objects(PyObject *args, Py_ssize_t count, ...);
/* Find the descriptors of a class with __slots__. False with an exception. */
bool find_slots(PyObject *class, const char *const *fields, size_t count, PyObject **slots);
/* What gets and sets a field by its descriptor, without looking it up by its name. */
extern descrgetfunc get_slot;
extern descrsetfunc set_slot;
void free_object(PyObject *self);
/* A new object if it is complete; else it is dropped, and NULL returned, with an exception that its maker has set. */
PyObject *finish_object(void *self, bool is_complete);
/* The functions of a type for the collector: `objects` is a macro that lists its members that are objects. */
#define VISIT_OBJECT(name) Py_VISIT((PyObject *)self->name);
#define CLEAR_OBJECT(name) Py_CLEAR(self->name);
#define TRAVERSE(structure, prefix, objects)                                                                           \
    static int prefix##_traverse(structure *self, visitproc visit, void *arg) {                                        \
        Py_VISIT(Py_TYPE((PyObject *)self));                                                                           \
        objects(VISIT_OBJECT)                                                                                          \
        return 0;                                                                                                      \
    }
#define CLEAR(structure, prefix, objects)                                                                              \
    static int prefix##_clear(structure *self) {                                                                       \
        objects(CLEAR_OBJECT)                                                                                          \
        return 0;                                                                                                      \
    }
/* Append an item, which is taken over, NULL with an exception. The list is gone with an exception. */
void append(PyObject **list, PyObject *item);
/* What a function returns that has taken a request, or has not. NULL with an exception that it has left. */
PyObject *answer(bool is_done);
/* The files that have types. */
#define FOR_PARTS(DO)                                                                                                  \
    DO(lock) DO(wc) DO(memory) DO(windows) DO(rc) DO(wire) DO(srq) DO(xrc) DO(connection) DO(route) DO(ud) DO(datagrams)
#define DECLARE_INIT(part) bool part##_init(PyObject *module);
FOR_PARTS(DECLARE_INIT)
/* What completions and requests are made of. */
PyObject *configure_wc(PyObject *module, PyObject *args);
PyObject *configure_requests(PyObject *module, PyObject *args);

#endif
