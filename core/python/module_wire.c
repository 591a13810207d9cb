/* Glue: wires. The caller of a Wire's methods holds its lock. */
#include "module.h"

#include <errno.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

PyTypeObject *wire_type;

/* -- events ---------------------------------------------------------------------------------------------------------- */

static void drop_finished(struct rdmacm_pin *pin) {
    while (pin) {
        struct rdmacm_pin *next = pin->next;
        drop_pin(pin);
        pin = next;
    }
}

void look_events(Wire *self, struct seen *seen) {
    struct rdmacm_wire *wire = self->wire;
    *seen = (struct seen){0};
    if (!wire)
        return;
    seen->finished = wire->finished;
    wire->finished = NULL;
    seen->has_added = wire->has_added;
    wire->has_added = false;
    seen->has_work = wire->events || wire->added || wire->has_counts || (wire->arrivals && !self->is_processing);
}

bool see_events(Wire *self, const struct seen *seen) {
    rdmacm_check_outside("Python is called");
    drop_finished(seen->finished);
    bool wake = seen->has_added && self->sleepers && PyObject_IsTrue(self->sleepers) > 0;
    if (!wake && !seen->has_work)
        return true;
    PyObject *done = self->on_events ? PyObject_CallFunctionObjArgs(self->on_events, NULL) : Py_NewRef(Py_None);
    Py_XDECREF(done);
    return done != NULL;
}

/* -- progress -------------------------------------------------------------------------------------------------------- */

/* Seconds. Once in PROGRESS_INTERVAL a poll is Python's, which makes full progress. */
#define PROGRESS_INTERVAL 0.001

/* The mutex is held. */
static int poll_sockets(Wire *self, const struct rdmacm_cq *queue) {
    struct rdmacm_wire *wire = self->wire;
    if (queue->count) /* of the thread that serves peers */
        return POLLED;
    if (!wire->is_enabled || !wire->conns_count || wire->arrivals || self->is_processing)
        return POLL_IN_PYTHON;
    double now = rdmacm_now();
    if (now >= self->progress_due) {
        self->progress_due = now + PROGRESS_INTERVAL;
        return POLL_IN_PYTHON;
    }
    enum rdmacm_polled polled = rdmacm_wire_poll(wire, queue, now);
    return polled == RDMACM_POLLED_OTHER ? POLL_IN_PYTHON : polled == RDMACM_POLLED ? POLLED : POLLED_NOTHING;
}

int poll_wire(Wire *self, struct rdmacm_cq *queue, struct seen *seen, struct rdmacm_entry *entries, size_t most,
              size_t *count) {
    PyThreadState *state = begin_core();
    int polled = poll_sockets(self, queue);
    *count = rdmacm_cq_take(queue, entries, most);
    look_events(self, seen);
    rdmacm_leave();
    if (polled == POLLED_NOTHING)
        rdmacm_wire_yield(self->wire);
    PyEval_RestoreThread(state);
    return polled;
}

void acknowledge(Wire *self) {
    PyThreadState *state = begin_core();
    rdmacm_wire_acknowledge(self->wire, rdmacm_now());
    end_core(state);
}

/* -- wires ----------------------------------------------------------------------------------------------------------- */

static PyObject *wire_new(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(keywords)) {
    PyObject *lock, *on_events, *sleepers;
    if (!PyArg_ParseTuple(args, "O!OO", lock_type, &lock, &on_events, &sleepers))
        return NULL;
    Wire *self = new_object(type);
    if (!self)
        return NULL;
    self->wire = rdmacm_wire_new();
    self->lock = (Lock *)Py_NewRef(lock);
    self->on_events = Py_NewRef(on_events);
    self->sleepers = Py_NewRef(sleepers);
    if (!self->wire)
        return finish_object(self, PyErr_NoMemory());
    self->wire->is_enabled = true;
    self->signal_fd = -1;
    return (PyObject *)self;
}

#define WIRE_OBJECTS(DO) DO(on_events) DO(sleepers)
TRAVERSE(Wire, wire, WIRE_OBJECTS)
CLEAR(Wire, wire, WIRE_OBJECTS)

static PyObject *wire_open(Wire *self, PyObject *argument) {
    long fd = PyLong_AsLong(argument);
    if (fd == -1 && PyErr_Occurred())
        return NULL;
    if (!self->wire || self->signal_fd >= 0)
        return PyErr_Format(PyExc_ValueError, "the wire is open, or of another process");
    self->signal_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    if (self->signal_fd < 0)
        return PyErr_SetFromErrno(PyExc_OSError);
    self->wire->poll_fd = (int)fd;
    return PyLong_FromLong(self->signal_fd);
}

static void close_signal(Wire *self) {
    if (self->signal_fd >= 0)
        close(self->signal_fd);
    self->signal_fd = -1;
}

static PyObject *wire_serve(Wire *self, PyObject *Py_UNUSED(ignored)) {
    struct rdmacm_wire *wire = self->wire;
    bool is_new = false;
    if (wire && self->signal_fd >= 0)
        CORE_DO(is_new = !wire->service && rdmacm_service_start(wire, self->signal_fd));
    return PyBool_FromLong(is_new);
}

static PyObject *wire_clear_signal(Wire *self, PyObject *Py_UNUSED(ignored)) {
    uint64_t count;
    enter_core(); /* as the thread that signals */
    bool failed = self->signal_fd >= 0 && read(self->signal_fd, &count, sizeof count) < 0 && errno != EAGAIN;
    if (self->wire && self->wire->service)
        rdmacm_service_clear_signal(self->wire);
    rdmacm_leave();
    return failed ? PyErr_SetFromErrno(PyExc_OSError) : Py_NewRef(Py_None);
}

static PyObject *wire_close(Wire *self, PyObject *Py_UNUSED(ignored)) {
    struct rdmacm_wire *wire = self->wire;
    if (!wire)
        Py_RETURN_NONE;
    if (wire->service) {
        Py_BEGIN_ALLOW_THREADS
        rdmacm_service_stop(wire);
        Py_END_ALLOW_THREADS
    }
    close_signal(self);
    enter_core();
    rdmacm_wire_forget_all(wire);
    rdmacm_wire_clear_arrivals(wire);
    rdmacm_wire_remove_groups(wire);
    for (; wire->added; wire->added = wire->added->next_added)
        wire->added->is_listed = false;
    wire->sources_count = 0;
    wire->recent = wire->poll_fd = -1;
    struct rdmacm_pin *finished = wire->finished;
    wire->finished = NULL;
    rdmacm_leave();
    drop_finished(finished);
    Py_RETURN_NONE;
}

static PyObject *wire_abandon(Wire *self, PyObject *Py_UNUSED(ignored)) {
    self->wire = NULL; /* leaked: a thread that fork(2) has not copied may have been about to change it */
    close_signal(self);
    Py_RETURN_NONE;
}

static void wire_dealloc(Wire *self) {
    PyObject_GC_UnTrack(self);
    if (self->wire) {
        Py_DECREF(wire_close(self, NULL)); /* nobody else has the wire, whose lock nobody takes therefore */
        rdmacm_wire_free(self->wire);
    }
    wire_clear(self);
    Py_XDECREF((PyObject *)self->lock);
    free_object((PyObject *)self);
}

static PyObject *wire_add_source(Wire *self, PyObject *argument) {
    long fd = PyLong_AsLong(argument);
    bool done = true;
    if (fd == -1 && PyErr_Occurred())
        return NULL;
    if (self->wire)
        CORE_DO(done = rdmacm_wire_add_source(self->wire, (int)fd, NULL));
    return done ? Py_NewRef(Py_None) : PyErr_NoMemory();
}

/* A group as group_key() of soft/wire/base.py has it: the address, and the index of the interface in four bytes more. */
struct group_key {
    const uint8_t *address;
    bool is_ipv6;
    uint32_t ifindex;
};

static bool set_group_key(struct group_key *key, const char *bytes, Py_ssize_t length) {
    if (length != 8 && length != 20) {
        PyErr_SetString(PyExc_ValueError, "an address of 4 or 16 bytes is wanted, and an index after it");
        return false;
    }
    key->address = (const uint8_t *)bytes;
    key->is_ipv6 = length == 20;
    key->ifindex = rdmacm_load32(key->address + length - 4);
    return true;
}

static PyObject *wire_add_group(Wire *self, PyObject *args) {
    int fd;
    const char *bytes;
    Py_ssize_t length;
    struct group_key key;
    if (!PyArg_ParseTuple(args, "iy#", &fd, &bytes, &length) || !set_group_key(&key, bytes, length))
        return NULL;
    bool done = true;
    if (self->wire)
        CORE_DO(done = rdmacm_wire_add_group(self->wire, fd, key.address, key.is_ipv6, key.ifindex));
    return done ? Py_NewRef(Py_None) : PyErr_NoMemory();
}

static PyObject *wire_remove_group(Wire *self, PyObject *argument) {
    long fd = PyLong_AsLong(argument);
    if (fd == -1 && PyErr_Occurred())
        return NULL;
    if (self->wire)
        CORE_DO(rdmacm_wire_remove_group(self->wire, (int)fd));
    Py_RETURN_NONE;
}

static PyObject *wire_set_members(Wire *self, PyObject *args) {
    const char *bytes;
    Py_ssize_t length;
    PyObject *numbers;
    struct group_key key;
    if (!PyArg_ParseTuple(args, "y#O!", &bytes, &length, &PyTuple_Type, &numbers) ||
        !set_group_key(&key, bytes, length))
        return NULL;
    size_t count = (size_t)PyTuple_Size(numbers);
    uint32_t *members = malloc((count ? count : 1) * sizeof *members);
    if (!members)
        return PyErr_NoMemory();
    for (size_t i = 0; i < count; i++)
        members[i] = (uint32_t)PyLong_AsUnsignedLong(PyTuple_GetItem(numbers, (Py_ssize_t)i));
    if (!PyErr_Occurred() && self->wire) {
        enter_core();
        struct rdmacm_group *group = rdmacm_wire_find_group(self->wire, key.address, key.is_ipv6, key.ifindex);
        if (group) {
            uint32_t *before = group->members;
            group->members = members;
            group->members_count = count;
            members = before;
        }
        rdmacm_leave();
    }
    free(members);
    return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
}

static PyObject *wire_receive(Wire *self, PyObject *argument) {
    long fd = PyLong_AsLong(argument);
    if (fd == -1 && PyErr_Occurred())
        return NULL;
    size_t count = 0;
    struct rdmacm_wire *wire = self->wire;
    if (wire) {
        PyThreadState *state = begin_core();
        count = rdmacm_wire_receive(wire, (int)fd, 1);
        if (wire->ready)
            rdmacm_wire_take_turns(wire, rdmacm_now());
        end_core(state);
    }
    return PyLong_FromSize_t(count);
}

/* A caller makes progress: send the ACKs that wait. How many datagrams the core has taken before. */
static uint64_t begin_progress(Wire *self, bool ends_arrivals) {
    struct rdmacm_wire *wire = self->wire;
    if (!wire)
        return 0;
    if (!self->is_background)
        atomic_fetch_add_explicit(&wire->calls, 1, memory_order_relaxed);
    enter_core();
    if (ends_arrivals)
        rdmacm_wire_end_arrivals(wire);
    bool has_acks = wire->acks;
    uint64_t taken = wire->taken;
    rdmacm_leave();
    if (has_acks)
        acknowledge(self);
    return taken;
}

static PyObject *wire_acknowledge(Wire *self, PyObject *Py_UNUSED(ignored)) {
    begin_progress(self, false);
    Py_RETURN_NONE;
}

static PyObject *wire_begin_turn(Wire *self, PyObject *Py_UNUSED(ignored)) {
    return PyLong_FromUnsignedLongLong(begin_progress(self, true));
}

static PyObject *wire_end_turn(Wire *self, PyObject *const *args, Py_ssize_t count) {
    struct rdmacm_wire *wire = self->wire;
    uint64_t taken = count == 2 ? PyLong_AsUnsignedLongLong(args[1]) : 0;
    if (count != 2 && !PyErr_Occurred())
        PyErr_SetString(PyExc_TypeError, "a queue and a number are wanted");
    if (PyErr_Occurred())
        return NULL;
    bool is_busy = false;
    if (wire) {
        enter_core();
        bool has_work = wire->ready || wire->acks;
        is_busy = wire->taken != taken;
        rdmacm_leave();
        if (has_work) {
            bool result = PyObject_IsTrue(args[0]) > 0;
            PyThreadState *state = begin_core();
            double now = rdmacm_now();
            if (wire->ready)
                rdmacm_wire_take_turns(wire, now);
            is_busy |= wire->ready != NULL;
            if (wire->acks)
                rdmacm_wire_end_turn(wire, result, now);
            end_core(state);
        }
    }
    return PyBool_FromLong(is_busy);
}

static PyObject *address_of(const struct sockaddr_storage *source) {
    if (source->ss_family == AF_INET) {
        const struct sockaddr_in *from = (const struct sockaddr_in *)source;
        return Py_BuildValue("y#iII", &from->sin_addr, (Py_ssize_t)4, ntohs(from->sin_port), 0u, 0u);
    }
    const struct sockaddr_in6 *from = (const struct sockaddr_in6 *)source;
    return Py_BuildValue("y#iII", &from->sin6_addr, (Py_ssize_t)16, ntohs(from->sin6_port),
                         ntohl(from->sin6_flowinfo) & 0xFFFFF, from->sin6_scope_id);
}

static PyObject *wire_take_arrivals(Wire *self, PyObject *Py_UNUSED(ignored)) {
    PyObject *list = PyList_New(0);
    struct rdmacm_arrival *arrival = NULL;
    if (list && self->wire)
        CORE_DO(arrival = rdmacm_wire_take_arrivals(self->wire));
    for (; list && arrival; arrival = arrival->next) /* nobody else has those that were taken */
        append(&list, Py_BuildValue("y#nNy#Iii", arrival->data, (Py_ssize_t)arrival->size,
                                    (Py_ssize_t)arrival->segment, address_of(&arrival->source), arrival->local,
                                    (Py_ssize_t)arrival->local_length, arrival->ifindex, arrival->traffic_class,
                                    arrival->hop_limit));
    return list;
}

static PyObject *wire_end_arrivals(Wire *self, PyObject *Py_UNUSED(ignored)) {
    if (self->wire)
        CORE_DO(rdmacm_wire_end_arrivals(self->wire));
    Py_RETURN_NONE;
}

static void append_count(PyObject **list, int code, uint64_t count) {
    if (*list && count)
        append(list, Py_BuildValue("iK", code, (unsigned long long)count));
}

static PyObject *wire_take_counts(Wire *self, PyObject *Py_UNUSED(ignored)) {
    struct rdmacm_wire *wire = self->wire;
    struct rdmacm_wire_counts counts;
    bool has_counts = false;
    if (wire) {
        enter_core();
        has_counts = wire->has_counts;
        if (has_counts) {
            counts = wire->tally->counts;
            wire->tally->counts = (struct rdmacm_wire_counts){0};
            wire->has_counts = false;
        }
        rdmacm_leave();
    }
    PyObject *list = PyList_New(0);
    if (!has_counts)
        return list;
    for (int code = 0; code < RDMACM_ERRNO_COUNT; code++)
        append_count(&list, code, counts.lost[code]);
    append_count(&list, RDMACM_COUNT_NO_ROOM, counts.no_room);
    append_count(&list, RDMACM_COUNT_TRAINS_CUT, counts.trains_cut);
    append_count(&list, RDMACM_COUNT_DROPPED, counts.dropped);
    return list;
}

/* -- queue pairs, and packets that none of them accepts -------------------------------------------------------------- */

static PyObject *wire_set_slots(Wire *self, PyObject *slots) {
    uint8_t own[RDMACM_MAX_SLOT / 8 + 1] = {0};
    Py_ssize_t count = slots == Py_None ? 0 : PyTuple_Check(slots) ? PyTuple_Size(slots) : -1;
    for (Py_ssize_t i = 0; i < count; i++) {
        size_t slot = PyLong_AsSize_t(PyTuple_GetItem(slots, i));
        if (slot <= RDMACM_MAX_SLOT)
            own[slot >> 3] |= (uint8_t)(1u << (slot & 7));
    }
    if (count < 0 && !PyErr_Occurred())
        PyErr_SetString(PyExc_TypeError, "a tuple of slots or None is wanted");
    if (PyErr_Occurred())
        return NULL;
    if (self->wire)
        CORE_DO(memcpy(self->wire->own_slots, own, sizeof own); self->wire->shares_port = slots != Py_None);
    Py_RETURN_NONE;
}

static PyObject *wire_accept(Wire *self, PyObject *args) {
    unsigned int qp_num, scope = 0;
    int accepts;
    const char *remote = NULL, *local = NULL;
    Py_ssize_t remote_length = 0, local_length = 0;
    if (!PyArg_ParseTuple(args, "Ii|y#y#I", &qp_num, &accepts, &remote, &remote_length, &local, &local_length, &scope))
        return NULL;
    if (accepts < RDMACM_ACCEPTS_ANY || accepts > RDMACM_ACCEPTS_PEER || local_length != remote_length ||
        (accepts == RDMACM_ACCEPTS_PEER && local_length != 4 && local_length != 16))
        return PyErr_Format(PyExc_ValueError, "two addresses of 4 or 16 bytes are wanted");
    if (!self->wire)
        Py_RETURN_NONE;
    enter_core();
    struct rdmacm_known *known = rdmacm_wire_know(self->wire, qp_num);
    if (known) {
        known->accepts = (int)accepts;
        if (accepts == RDMACM_ACCEPTS_PEER) {
            known->is_ipv6 = local_length == 16;
            memcpy(known->remote, remote, (size_t)remote_length);
            memcpy(known->local, local, (size_t)local_length);
            known->scope = scope;
        }
    }
    rdmacm_leave();
    return known ? Py_NewRef(Py_None) : PyErr_NoMemory();
}

static const char *const stray_names[RDMACM_STRAYS] = {
    [RDMACM_SHORT] = "short",           [RDMACM_STRAY] = "stray",
    [RDMACM_BACKLOG] = "backlog_full",  [RDMACM_SHORT_TRAIN] = "short",
    [RDMACM_UNKNOWN_QP] = "unknown_qp", [RDMACM_WRONG_ADDRESS] = "address",
    [RDMACM_WRONG_STATE] = "state",     [RDMACM_NO_MEMBER] = "group",
};

static PyObject *wire_take_traffic(Wire *self, PyObject *Py_UNUSED(ignored)) {
    struct rdmacm_traffic traffic = {0};
    if (self->wire)
        CORE_DO(traffic = self->wire->tally->traffic; self->wire->tally->traffic = (struct rdmacm_traffic){0});
    return Py_BuildValue("KKKKKKK", (unsigned long long)traffic.sent_packets, (unsigned long long)traffic.sent_bytes,
                         (unsigned long long)traffic.received_packets, (unsigned long long)traffic.received_bytes,
                         (unsigned long long)traffic.unsent_packets, (unsigned long long)traffic.sent_multicast,
                         (unsigned long long)traffic.received_multicast);
}

static PyObject *wire_take_strays(Wire *self, PyObject *Py_UNUSED(ignored)) {
    struct rdmacm_wire *wire = self->wire;
    uint64_t counts[RDMACM_STRAYS] = {0};
    if (!wire)
        Py_RETURN_NONE;
    enter_core();
    bool has_any = rdmacm_wire_has_strays(wire);
    if (has_any) {
        memcpy(counts, wire->tally->strays, sizeof counts);
        memset(wire->tally->strays, 0, sizeof wire->tally->strays);
    }
    rdmacm_leave();
    if (!has_any)
        Py_RETURN_NONE;
    PyObject *strays = PyList_New(0), *refused = PyList_New(0);
    for (int i = 0; i < RDMACM_STRAYS; i++)
        if (counts[i])
            append(&strays,
                   Py_BuildValue("OsK", i < RDMACM_SHORT_TRAIN ? Py_True : Py_False, stray_names[i],
                                 (unsigned long long)counts[i]));
    for (;;) {
        uint64_t of_one[RDMACM_REFUSALS];
        enter_core();
        struct rdmacm_known *known = wire->refusing;
        uint32_t qp_num = 0;
        if (known) {
            wire->refusing = known->next;
            known->is_listed = false;
            qp_num = known->qp_num;
            memcpy(of_one, known->refused, sizeof of_one);
            memset(known->refused, 0, sizeof known->refused);
        }
        rdmacm_leave();
        if (!known)
            break;
        for (size_t i = 0; i < RDMACM_REFUSALS; i++)
            if (of_one[i])
                append(&refused, Py_BuildValue("IsK", qp_num, refusal_names[i], (unsigned long long)of_one[i]));
    }
    return Py_BuildValue("NN", strays, refused);
}

static PyObject *wire_forget(Wire *self, PyObject *argument) {
    unsigned long qp_num = PyLong_AsUnsignedLong(argument);
    if (qp_num == (unsigned long)-1 && PyErr_Occurred())
        return NULL;
    PyObject *strays = wire_take_strays(self, NULL); /* else those of the queue pair would be gone with it */
    if (strays && self->wire)
        CORE_DO(rdmacm_wire_forget(self->wire, (uint32_t)qp_num));
    return strays;
}

/* What is taken at a time. */
enum { MOST_EVENTS = 32 };

struct event {
    PyObject *owner; /* a new reference */
    unsigned events;
    bool has_deadline;
    double deadline;
    struct rdmacm_counts counts;
};

/* The mutex is held, and the interpreter's lock. */
static size_t pop_events(struct rdmacm_wire *wire, struct event *found) {
    size_t count = 0;
    for (struct rdmacm_conn *conn; count < MOST_EVENTS && (conn = wire->events); count++) {
        wire->events = conn->next_event;
        conn->in_events = false;
        struct event *event = &found[count];
        event->owner = Py_NewRef((PyObject *)conn->owner);
        event->events = conn->events;
        conn->events = 0;
        if (event->events & RDMACM_EVENT_TIMER)
            conn->has_timer = true;
        event->has_deadline = conn->rc && conn->rc->has_deadline;
        event->deadline = event->has_deadline ? conn->rc->deadline : 0;
        event->counts = pop_counts(conn->queues);
    }
    return count;
}

static PyObject *wire_take_events(Wire *self, PyObject *Py_UNUSED(ignored)) {
    PyObject *list = PyList_New(0);
    struct event found[MOST_EVENTS];
    size_t count = MOST_EVENTS;
    while (list && self->wire && count == MOST_EVENTS) {
        CORE_DO(count = pop_events(self->wire, found));
        for (size_t i = 0; i < count; i++) {
            const struct event *event = &found[i];
            PyObject *deadline = event->has_deadline ? PyFloat_FromDouble(event->deadline) : Py_NewRef(Py_None);
            append(&list,
                   Py_BuildValue("OINN", event->owner, event->events, deadline, list_counts(&event->counts)));
            Py_DECREF(event->owner);
        }
    }
    return list;
}

static PyObject *wire_take_added(Wire *self, PyObject *Py_UNUSED(ignored)) {
    PyObject *list = PyList_New(0);
    while (list && self->wire) {
        enter_core();
        struct rdmacm_cq *cq = self->wire->added;
        PyObject *owner = NULL;
        bool solicited = false, overrun = false;
        if (cq) {
            self->wire->added = cq->next_added;
            cq->is_listed = false;
            solicited = cq->solicited, overrun = cq->overrun;
            cq->solicited = false;
            owner = Py_XNewRef(((CompletionQueue *)cq->owner)->owner);
        }
        rdmacm_leave();
        if (!cq)
            break;
        if (owner)
            append(&list,
                   Py_BuildValue("NOO", owner, solicited ? Py_True : Py_False, overrun ? Py_True : Py_False));
    }
    return list;
}

/* -- fields of a wire ------------------------------------------------------------------------------------------------ */

/* A getter: `value` of self->wire, 0 without one. */
#define GETTER(name, type, value, convert)                                                                             \
    static PyObject *name(Wire *self, void *Py_UNUSED(closure)) {                                                      \
        type found = 0;                                                                                                \
        if (self->wire)                                                                                                \
            CORE_DO(found = (value));                                                                                  \
        return convert(found);                                                                                         \
    }

GETTER(get_is_enabled, bool, self->wire->is_enabled, PyBool_FromLong)
GETTER(get_may_defer_acks, bool, self->wire->may_defer_acks, PyBool_FromLong)
/* Whether it reads the sockets for Python. */
GETTER(get_is_active, bool, self->wire->is_enabled && self->wire->conns_count, PyBool_FromLong)
GETTER(get_has_arrivals, bool, self->wire->arrivals, PyBool_FromLong)
/* Whether see_core_wire() of the owner has something to take. */
GETTER(get_has_work, bool, rdmacm_wire_has_strays(self->wire) || self->wire->has_counts || self->wire->events ||
                               self->wire->added, PyBool_FromLong)
/* Whether the owner has to come back soon: more has to be sent, or packets wait for it. */
GETTER(get_has_more, bool, self->wire->ready || self->wire->arrivals, PyBool_FromLong)
GETTER(get_is_served, bool, self->wire->service, PyBool_FromLong)
GETTER(get_taken, uint64_t, self->wire->taken, PyLong_FromUnsignedLongLong)
GETTER(get_deferrals, uint64_t, self->wire->deferrals, PyLong_FromUnsignedLongLong)

static int set_is_enabled(Wire *self, PyObject *value, void *Py_UNUSED(closure)) {
    struct rdmacm_wire *wire = self->wire;
    if (wire) {
        bool is_enabled = value && PyObject_IsTrue(value) > 0;
        take_lock(self->lock);
        PyThreadState *state = begin_core();
        /* What the core has to send leaves before a tap is there, which sees all that follows. */
        rdmacm_wire_acknowledge(wire, rdmacm_now());
        while (wire->ready)
            rdmacm_wire_take_turns(wire, rdmacm_now());
        wire->is_enabled = is_enabled;
        end_core(state);
        rdmacm_lock_release(&self->lock->lock);
    }
    return 0;
}

static int set_may_defer_acks(Wire *self, PyObject *value, void *Py_UNUSED(closure)) {
    bool may = value && PyObject_IsTrue(value) > 0;
    if (self->wire)
        CORE_DO(self->wire->may_defer_acks = may);
    return 0;
}

static PyObject *get_calls(Wire *self, void *Py_UNUSED(closure)) {
    return PyLong_FromUnsignedLongLong(self->wire ? atomic_load(&self->wire->calls) : 0);
}

static PyGetSetDef wire_getset[] = {
    {"is_enabled", (getter)get_is_enabled, (setter)set_is_enabled, NULL, NULL},
    {"may_defer_acks", (getter)get_may_defer_acks, (setter)set_may_defer_acks, NULL, NULL},
    {"is_active", (getter)get_is_active, NULL, NULL, NULL},
    {"has_arrivals", (getter)get_has_arrivals, NULL, NULL, NULL},
    {"has_work", (getter)get_has_work, NULL, NULL, NULL},
    {"has_more", (getter)get_has_more, NULL, NULL, NULL},
    {"calls", (getter)get_calls, NULL, NULL, NULL},
    {"is_served", (getter)get_is_served, NULL, NULL, NULL},
    {"taken", (getter)get_taken, NULL, NULL, NULL},
    {"deferrals", (getter)get_deferrals, NULL, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMemberDef wire_members[] = {
    {"is_processing", T_BOOL, offsetof(Wire, is_processing), 0, NULL},
    {"is_background", T_BOOL, offsetof(Wire, is_background), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyMethodDef wire_methods[] = {
    {"open", (PyCFunction)wire_open, METH_O,
     "open(poll_fd): the epoll descriptor of all that the owner reads; one that is readable when it has to look here."},
    {"serve", (PyCFunction)wire_serve, METH_NOARGS, "Have a thread serve the peers; True if it is new."},
    {"clear_signal", (PyCFunction)wire_clear_signal, METH_NOARGS, "The owner has looked at that descriptor."},
    {"close", (PyCFunction)wire_close, METH_NOARGS, "Let go of the connections and of the sockets, which stay open."},
    {"abandon", (PyCFunction)wire_abandon, METH_NOARGS, "In a child of fork(2): do nothing any more."},
    {"add_source", (PyCFunction)wire_add_source, METH_O, "add_source(fd): read a UDP socket."},
    {"add_group", (PyCFunction)wire_add_group, METH_VARARGS,
     "add_group(fd, key): read the socket of a multicast group, which group_key() names."},
    {"remove_group", (PyCFunction)wire_remove_group, METH_O, "remove_group(fd): before the socket is closed."},
    {"set_members", (PyCFunction)wire_set_members, METH_VARARGS,
     "set_members(key, numbers): the queue pairs that are attached to a group."},
    {"receive", (PyCFunction)wire_receive, METH_O, "receive(fd): read a socket; the number of datagrams."},
    {"acknowledge", (PyCFunction)wire_acknowledge, METH_NOARGS, "Send the ACKs that wait."},
    {"begin_turn", (PyCFunction)wire_begin_turn, METH_NOARGS,
     "Before the sockets are read: end_arrivals() and acknowledge(); returns `taken`."},
    {"end_turn", (PyCFunction)(void (*)(void))wire_end_turn, METH_FASTCALL,
     "end_turn(has_result, taken): after that, send more, and the ACKs, unless they may be deferred. Whether the core\n"
     "has taken packets since begin_turn() returned `taken`, or has still more to send."},
    {"take_arrivals", (PyCFunction)wire_take_arrivals, METH_NOARGS,
     "What was not processed: (data, segment, (address, port, flow, scope), local, interface of a multicast group or 0,\n"
     "traffic class, hop limit)."},
    {"end_arrivals", (PyCFunction)wire_end_arrivals, METH_NOARGS, "Those that were taken have been processed."},
    {"take_counts", (PyCFunction)wire_take_counts, METH_NOARGS,
     "Packets lost: (errno, count); -1 stands for no room, -2 for trains that were cut, -3 for packets dropped."},
    {"set_slots", (PyCFunction)wire_set_slots, METH_O,
     "set_slots(slots): those of this process, if it shares the port with others; else None."},
    {"accept", (PyCFunction)wire_accept, METH_VARARGS,
     "accept(qp_num, whose, remote, local, scope): a queue pair accepts packets of all (0), of nobody (1), or those\n"
     "between two addresses (2)."},
    {"forget", (PyCFunction)wire_forget, METH_O,
     "forget(qp_num): there is no such queue pair any more. Returns what take_strays() returns."},
    {"take_strays", (PyCFunction)wire_take_strays, METH_NOARGS,
     "Packets dropped: (of the wire, reason, count) and (qp_num, reason, count); None: there were none."},
    {"take_traffic", (PyCFunction)wire_take_traffic, METH_NOARGS,
     "Packets and bytes sent, packets and bytes received, packets that were refused, since the last call."},
    {"take_events", (PyCFunction)wire_take_events, METH_NOARGS, "(owner, events, deadline, counts) of connections."},
    {"take_added", (PyCFunction)wire_take_added, METH_NOARGS, "(owner, solicited, overrun) of queues."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot wire_slots[] = {
    SLOT(tp_doc, "Wire(lock, on_events, sleepers): the sockets of a UdpWire (docs/core.md)."),
    SLOT(tp_new, wire_new),
    SLOT(tp_traverse, wire_traverse),
    SLOT(tp_clear, wire_clear),
    SLOT(tp_dealloc, wire_dealloc),
    SLOT(tp_getset, wire_getset),
    SLOT(tp_members, wire_members),
    SLOT(tp_methods, wire_methods),
    {0, NULL},
};

bool wire_init(PyObject *module) {
    wire_type = ADD_TYPE(module, Wire, Py_TPFLAGS_HAVE_GC, wire_slots);
    return wire_type != NULL;
}
