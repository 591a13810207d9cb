/* Glue: the lock of a runtime, the mutex of the core, and ports.
 *
 * The caller of a Port's methods holds its lock. No thread waits for the interpreter's lock with the mutex: the thread
 * that serves peers would wait for both. So the mutex is taken after the interpreter's lock is released, and given back
 * before that is taken again; or it is taken for a few steps that call nothing of Python.
 */
#include "module.h"

#include <errno.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

PyTypeObject *port_type;
static PyTypeObject *lock_type;

/* -- the lock -------------------------------------------------------------------------------------------------------- */

static PyObject *lock_new(PyTypeObject *type, PyObject *Py_UNUSED(args), PyObject *Py_UNUSED(keywords)) {
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    Lock *self = (Lock *)allocate(type, 0);
    if (self && !rdmacm_lock_init(&self->lock)) {
        Py_DECREF((PyObject *)self);
        return PyErr_NoMemory();
    }
    return (PyObject *)self;
}

static void lock_dealloc(Lock *self) {
    /* Not destroyed where a thread has it that fork(2) has not copied. */
    if (!atomic_load(&self->lock.owner))
        rdmacm_lock_destroy(&self->lock);
    free_object((PyObject *)self);
}

void take_lock(Lock *lock) {
    rdmacm_check_outside("the lock of a runtime is waited for");
    if (rdmacm_lock_try(&lock->lock))
        return;
    Py_BEGIN_ALLOW_THREADS
    rdmacm_lock_take(&lock->lock);
    Py_END_ALLOW_THREADS
}

static PyObject *lock_acquire(Lock *self, PyObject *args) {
    int blocking = 1;
    if (!PyArg_ParseTuple(args, "|p", &blocking))
        return NULL;
    if (!blocking)
        return PyBool_FromLong(rdmacm_lock_try(&self->lock));
    take_lock(self);
    Py_RETURN_TRUE;
}

static PyObject *lock_enter(Lock *self, PyObject *Py_UNUSED(ignored)) {
    take_lock(self);
    Py_RETURN_TRUE;
}

static PyObject *lock_release(Lock *self, PyObject *Py_UNUSED(ignored)) {
    if (!rdmacm_lock_release(&self->lock)) {
        PyErr_SetString(PyExc_RuntimeError, "cannot release a lock that this thread does not have");
        return NULL;
    }
    Py_RETURN_NONE;
}

static PyObject *lock_exit(Lock *self, PyObject *const *Py_UNUSED(args), Py_ssize_t Py_UNUSED(count)) {
    return lock_release(self, NULL);
}

static PyMethodDef lock_methods[] = {
    {"acquire", (PyCFunction)lock_acquire, METH_VARARGS, "acquire(blocking=True): whether it was taken."},
    {"release", (PyCFunction)lock_release, METH_NOARGS, "Undo acquire()."},
    {"__enter__", (PyCFunction)lock_enter, METH_NOARGS, "acquire()"},
    {"__exit__", (PyCFunction)(void (*)(void))lock_exit, METH_FASTCALL, "release()"},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot lock_slots[] = {
    {Py_tp_doc, (void *)(uintptr_t) "A lock as threading.RLock, which threads without an interpreter can take too."},
    {Py_tp_new, (void *)(uintptr_t)lock_new},
    {Py_tp_dealloc, (void *)(uintptr_t)lock_dealloc},
    {Py_tp_methods, lock_methods},
    {0, NULL},
};

static PyType_Spec lock_spec = {
    .name = "rdmacm.proto._core.Lock",
    .basicsize = sizeof(Lock),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = lock_slots,
};

/* -- the mutex ------------------------------------------------------------------------------------------------------- */

/* How often a thread lets others have the interpreter while it waits for the mutex. */
enum { PATIENCE = 4 };

void enter_core(void) {
    for (int i = 0; !rdmacm_try_enter(); i++) {
        if (i == PATIENCE) {
            rdmacm_enter(); /* its holder does not need the interpreter */
            return;
        }
        end_core(begin_core());
    }
}

bool enter_shared(const bool *is_shared) {
    if (*is_shared)
        enter_core();
    return *is_shared;
}

void leave_shared(bool is_entered) {
    if (is_entered)
        rdmacm_leave();
}

PyThreadState *begin_core(void) {
    rdmacm_check_outside("the interpreter is released");
    PyThreadState *state = PyEval_SaveThread();
    rdmacm_enter();
    return state;
}

void end_core(PyThreadState *state) {
    rdmacm_leave();
    PyEval_RestoreThread(state);
}

/* -- events ---------------------------------------------------------------------------------------------------------- */

static void drop_finished(struct rdmacm_hold *hold) {
    while (hold) {
        struct rdmacm_hold *next = hold->next;
        drop_hold(hold);
        hold = next;
    }
}

void look_events(Port *self, struct seen *seen) {
    struct rdmacm_port *port = self->port;
    *seen = (struct seen){0};
    if (!port)
        return;
    seen->finished = port->finished;
    port->finished = NULL;
    seen->has_added = port->has_added;
    port->has_added = false;
    seen->has_work = port->events || port->added || port->has_counts || (port->arrivals && !self->is_processing);
}

bool see_events(Port *self, const struct seen *seen) {
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

enum {
    POLLS_PER_LOOK = 16, /* one in so many looks at all descriptors */
    POLLS_PER_YIELD = 4,
    MOST_POLLS = 16384, /* from one yield to the next */
    MOST_READY = 8,
};

/* Seconds. Once in PROGRESS_INTERVAL a poll is Python's, which makes full progress. */
#define PROGRESS_INTERVAL 0.001
#define LONG_YIELD 0.0005

/* Read all sockets of the port that have something; false where another descriptor is ready, or one has an error. */
static bool look(struct rdmacm_port *port, size_t *count) {
    struct epoll_event ready[MOST_READY];
    int found = epoll_wait(port->poll_fd, ready, MOST_READY, 0);
    bool is_mine = true;
    for (int i = 0; i < found; i++) {
        size_t at = 0;
        while (at < port->sources_count && port->sources[at] != ready[i].data.fd)
            at++;
        if (at == port->sources_count || ready[i].events & EPOLLERR)
            is_mine = false;
        else
            *count += rdmacm_port_receive(port, ready[i].data.fd, 1);
    }
    return is_mine;
}

/* Yield the processor after some polls in vain: the peer may need it. Where somebody else computes on it, which takes
 * milliseconds, yield less often. */
static void yield(struct rdmacm_port *port) {
    if (++port->empty_polls < port->yield_interval)
        return;
    double before = rdmacm_now();
    sched_yield();
    bool is_long = rdmacm_now() - before > LONG_YIELD;
    port->empty_polls = 0;
    port->yield_interval = !is_long                             ? POLLS_PER_YIELD
                           : port->yield_interval < MOST_POLLS ? 8 * port->yield_interval
                                                               : port->yield_interval;
}

/* The mutex is held. */
static int poll_sockets(Port *self, const struct rdmacm_cq *queue) {
    struct rdmacm_port *port = self->port;
    if (queue->count) /* of the thread that serves peers */
        return POLLED;
    if (!port->is_enabled || !port->conns_count || port->arrivals || self->is_processing)
        return POLL_IN_PYTHON;
    double now = rdmacm_now();
    if (now >= self->progress_due) {
        self->progress_due = now + PROGRESS_INTERVAL;
        return POLL_IN_PYTHON;
    }
    self->polls++;
    bool is_done = true;
    size_t count = 0;
    atomic_fetch_add_explicit(&port->calls, 1, memory_order_relaxed);
    if (port->acks)
        rdmacm_port_acknowledge(port, now);
    if (port->recent < 0 || self->polls % POLLS_PER_LOOK == 0)
        is_done = look(port, &count);
    else
        count = rdmacm_port_receive(port, port->recent, 1);
    if (!count && now >= port->timers_due)
        rdmacm_port_call_timers(port, now);
    if (port->ready)
        rdmacm_port_take_turns(port, now);
    if (port->acks)
        rdmacm_port_end_turn(port, queue->count > 0, now);
    if (count && port->yield_interval == POLLS_PER_YIELD)
        port->empty_polls = 0;
    return !is_done ? POLL_IN_PYTHON : count ? POLLED : POLLED_NOTHING;
}

int poll_port(Port *self, struct rdmacm_cq *queue, struct seen *seen, struct rdmacm_entry *entries, size_t most,
              size_t *count) {
    PyThreadState *state = begin_core();
    int polled = poll_sockets(self, queue);
    *count = rdmacm_cq_take(queue, entries, most);
    look_events(self, seen);
    rdmacm_leave();
    if (polled == POLLED_NOTHING)
        yield(self->port);
    PyEval_RestoreThread(state);
    return polled;
}

void acknowledge(Port *self) {
    PyThreadState *state = begin_core();
    rdmacm_port_acknowledge(self->port, rdmacm_now());
    end_core(state);
}

/* -- ports ----------------------------------------------------------------------------------------------------------- */

static PyObject *port_new(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(keywords)) {
    PyObject *lock, *on_events, *sleepers;
    if (!PyArg_ParseTuple(args, "O!OO", lock_type, &lock, &on_events, &sleepers))
        return NULL;
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    Port *self = (Port *)allocate(type, 0);
    if (!self)
        return NULL;
    self->port = rdmacm_port_new();
    self->lock = (Lock *)Py_NewRef(lock);
    self->on_events = Py_NewRef(on_events);
    self->sleepers = Py_NewRef(sleepers);
    if (!self->port) {
        Py_DECREF((PyObject *)self);
        return PyErr_NoMemory();
    }
    self->port->is_enabled = true;
    self->port->yield_interval = POLLS_PER_YIELD;
    self->signal_fd = -1;
    return (PyObject *)self;
}

static int port_traverse(Port *self, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE((PyObject *)self));
    Py_VISIT(self->on_events);
    Py_VISIT(self->sleepers);
    return 0;
}

static int port_clear(Port *self) {
    Py_CLEAR(self->on_events);
    Py_CLEAR(self->sleepers);
    return 0;
}

static PyObject *port_open(Port *self, PyObject *argument) {
    long fd = PyLong_AsLong(argument);
    if (fd == -1 && PyErr_Occurred())
        return NULL;
    if (!self->port || self->signal_fd >= 0)
        return PyErr_Format(PyExc_ValueError, "the port is open, or of another process");
    self->signal_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    if (self->signal_fd < 0)
        return PyErr_SetFromErrno(PyExc_OSError);
    self->port->poll_fd = (int)fd;
    return PyLong_FromLong(self->signal_fd);
}

static void close_signal(Port *self) {
    if (self->signal_fd >= 0)
        close(self->signal_fd);
    self->signal_fd = -1;
}

static PyObject *port_serve(Port *self, PyObject *Py_UNUSED(ignored)) {
    struct rdmacm_port *port = self->port;
    bool is_new = false;
    if (port && self->signal_fd >= 0) {
        enter_core();
        is_new = !port->service && rdmacm_service_start(port, self->signal_fd);
        rdmacm_leave();
    }
    return PyBool_FromLong(is_new);
}

static PyObject *port_clear_signal(Port *self, PyObject *Py_UNUSED(ignored)) {
    uint64_t count;
    enter_core(); /* as the thread that signals */
    bool failed = self->signal_fd >= 0 && read(self->signal_fd, &count, sizeof count) < 0 && errno != EAGAIN;
    if (self->port && self->port->service)
        rdmacm_service_clear_signal(self->port);
    rdmacm_leave();
    if (failed)
        return PyErr_SetFromErrno(PyExc_OSError);
    Py_RETURN_NONE;
}

static PyObject *port_close(Port *self, PyObject *Py_UNUSED(ignored)) {
    struct rdmacm_port *port = self->port;
    if (!port)
        Py_RETURN_NONE;
    if (port->service) {
        Py_BEGIN_ALLOW_THREADS
        rdmacm_service_stop(port);
        Py_END_ALLOW_THREADS
    }
    close_signal(self);
    enter_core();
    rdmacm_port_forget_all(port);
    rdmacm_port_clear_arrivals(port);
    for (; port->added; port->added = port->added->next_added)
        port->added->is_listed = false;
    port->sources_count = 0;
    port->recent = port->poll_fd = -1;
    struct rdmacm_hold *finished = port->finished;
    port->finished = NULL;
    rdmacm_leave();
    drop_finished(finished);
    Py_RETURN_NONE;
}

static PyObject *port_abandon(Port *self, PyObject *Py_UNUSED(ignored)) {
    self->port = NULL; /* leaked: a thread that fork(2) has not copied may have been about to change it */
    close_signal(self);
    Py_RETURN_NONE;
}

static void port_dealloc(Port *self) {
    PyObject_GC_UnTrack(self);
    if (self->port) {
        Py_DECREF(port_close(self, NULL)); /* nobody else has the port, whose lock nobody takes therefore */
        rdmacm_port_free(self->port);
    }
    port_clear(self);
    Py_XDECREF((PyObject *)self->lock);
    free_object((PyObject *)self);
}

static PyObject *port_add_source(Port *self, PyObject *argument) {
    long fd = PyLong_AsLong(argument);
    if (fd == -1 && PyErr_Occurred())
        return NULL;
    if (self->port) {
        enter_core();
        bool done = rdmacm_port_add_source(self->port, (int)fd);
        rdmacm_leave();
        if (!done)
            return PyErr_NoMemory();
    }
    Py_RETURN_NONE;
}

static PyObject *port_receive(Port *self, PyObject *argument) {
    long fd = PyLong_AsLong(argument);
    if (fd == -1 && PyErr_Occurred())
        return NULL;
    size_t count = 0;
    struct rdmacm_port *port = self->port;
    if (port) {
        PyThreadState *state = begin_core();
        count = rdmacm_port_receive(port, (int)fd, 1);
        if (port->ready)
            rdmacm_port_take_turns(port, rdmacm_now());
        end_core(state);
    }
    return PyLong_FromSize_t(count);
}

static PyObject *port_acknowledge(Port *self, PyObject *Py_UNUSED(ignored)) {
    if (self->port && !self->is_background)
        atomic_fetch_add_explicit(&self->port->calls, 1, memory_order_relaxed);
    if (self->port) {
        enter_core();
        bool has_acks = self->port->acks;
        rdmacm_leave();
        if (has_acks)
            acknowledge(self);
    }
    Py_RETURN_NONE;
}

static PyObject *port_begin_turn(Port *self, PyObject *Py_UNUSED(ignored)) {
    struct rdmacm_port *port = self->port;
    uint64_t taken = 0;
    if (port) {
        if (!self->is_background)
            atomic_fetch_add_explicit(&port->calls, 1, memory_order_relaxed);
        enter_core();
        rdmacm_port_end_arrivals(port);
        bool has_acks = port->acks;
        taken = port->taken;
        rdmacm_leave();
        if (has_acks)
            acknowledge(self);
    }
    return PyLong_FromUnsignedLongLong(taken);
}

static PyObject *port_end_turn(Port *self, PyObject *const *args, Py_ssize_t count) {
    struct rdmacm_port *port = self->port;
    uint64_t taken = count == 2 ? PyLong_AsUnsignedLongLong(args[1]) : 0;
    if (count != 2 && !PyErr_Occurred())
        PyErr_SetString(PyExc_TypeError, "a queue and a number are wanted");
    if (PyErr_Occurred())
        return NULL;
    bool is_busy = false;
    if (port) {
        enter_core();
        bool has_work = port->ready || port->acks;
        is_busy = port->taken != taken;
        rdmacm_leave();
        if (has_work) {
            bool result = PyObject_IsTrue(args[0]) > 0;
            PyThreadState *state = begin_core();
            double now = rdmacm_now();
            if (port->ready)
                rdmacm_port_take_turns(port, now);
            is_busy |= port->ready != NULL;
            if (port->acks)
                rdmacm_port_end_turn(port, result, now);
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

static PyObject *port_take_arrivals(Port *self, PyObject *Py_UNUSED(ignored)) {
    PyObject *list = PyList_New(0);
    struct rdmacm_arrival *arrival = NULL;
    if (list && self->port) {
        enter_core();
        arrival = rdmacm_port_take_arrivals(self->port);
        rdmacm_leave();
    }
    for (; list && arrival; arrival = arrival->next) { /* nobody else has those that were taken */
        PyObject *item = Py_BuildValue("y#nNy#ii", arrival->data, (Py_ssize_t)arrival->size,
                                       (Py_ssize_t)arrival->segment, address_of(&arrival->source), arrival->local,
                                       (Py_ssize_t)arrival->local_length, arrival->traffic_class,
                                       arrival->hop_limit);
        if (!item || PyList_Append(list, item) < 0)
            Py_CLEAR(list);
        Py_XDECREF(item);
    }
    return list;
}

static PyObject *port_end_arrivals(Port *self, PyObject *Py_UNUSED(ignored)) {
    if (self->port) {
        enter_core();
        rdmacm_port_end_arrivals(self->port);
        rdmacm_leave();
    }
    Py_RETURN_NONE;
}

static PyObject *port_take_counts(Port *self, PyObject *Py_UNUSED(ignored)) {
    struct rdmacm_port *port = self->port;
    PyObject *list = PyList_New(0);
    if (!list || !port)
        return list;
    struct {
        int code;
        unsigned long count;
    } found[RDMACM_ERRNO_COUNT + 3];
    size_t count = 0;
    enter_core();
    if (!port->has_counts) {
        rdmacm_leave();
        return list;
    }
    port->has_counts = false;
    for (int code = 0; code < RDMACM_ERRNO_COUNT; code++) {
        if (port->lost[code]) {
            found[count].code = code;
            found[count++].count = port->lost[code];
            port->lost[code] = 0;
        }
    }
    found[count].code = RDMACM_COUNT_NO_ROOM;
    found[count++].count = port->no_room;
    found[count].code = RDMACM_COUNT_TRAINS_CUT;
    found[count++].count = port->trains_cut;
    found[count].code = RDMACM_COUNT_DROPPED;
    found[count++].count = port->dropped;
    port->no_room = port->trains_cut = port->dropped = 0;
    rdmacm_leave();
    for (size_t i = 0; list && i < count; i++) {
        PyObject *item = found[i].count ? Py_BuildValue("ik", found[i].code, found[i].count) : Py_NewRef(Py_None);
        if (!item || (item != Py_None && PyList_Append(list, item) < 0))
            Py_CLEAR(list);
        Py_XDECREF(item);
    }
    return list;
}

/* -- queue pairs, and packets that none of them accepts -------------------------------------------------------------- */

static PyObject *port_set_slots(Port *self, PyObject *slots) {
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
    if (self->port) {
        enter_core();
        memcpy(self->port->own_slots, own, sizeof own);
        self->port->shares_port = slots != Py_None;
        rdmacm_leave();
    }
    Py_RETURN_NONE;
}

static PyObject *port_accept(Port *self, PyObject *args) {
    unsigned int qp_num, scope = 0;
    int accepts;
    const char *remote = NULL, *local = NULL;
    Py_ssize_t remote_length = 0, local_length = 0;
    if (!PyArg_ParseTuple(args, "Ii|y#y#I", &qp_num, &accepts, &remote, &remote_length, &local, &local_length, &scope))
        return NULL;
    if (accepts < RDMACM_ACCEPTS_ANY || accepts > RDMACM_ACCEPTS_PEER || local_length != remote_length ||
        (accepts == RDMACM_ACCEPTS_PEER && local_length != 4 && local_length != 16))
        return PyErr_Format(PyExc_ValueError, "two addresses of 4 or 16 bytes are wanted");
    if (!self->port)
        Py_RETURN_NONE;
    enter_core();
    struct rdmacm_known *known = rdmacm_port_know(self->port, qp_num);
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
    if (!known)
        return PyErr_NoMemory();
    Py_RETURN_NONE;
}

static PyObject *port_forget(Port *self, PyObject *argument) {
    unsigned long qp_num = PyLong_AsUnsignedLong(argument);
    if (qp_num == (unsigned long)-1 && PyErr_Occurred())
        return NULL;
    if (self->port) {
        enter_core();
        rdmacm_port_forget(self->port, (uint32_t)qp_num);
        rdmacm_leave();
    }
    Py_RETURN_NONE;
}

static const char *const stray_names[RDMACM_STRAYS] = {
    [RDMACM_SHORT] = "short",           [RDMACM_STRAY] = "stray",
    [RDMACM_BACKLOG] = "backlog_full",  [RDMACM_SHORT_TRAIN] = "short",
    [RDMACM_UNKNOWN_QP] = "unknown_qp", [RDMACM_WRONG_ADDRESS] = "address",
    [RDMACM_WRONG_STATE] = "state",
};

static const char *const refusal_names[RDMACM_REFUSALS] = {
    [RDMACM_REFUSED_LENGTH] = "length", [RDMACM_REFUSED_OPCODE] = "opcode",
    [RDMACM_REFUSED_VERSION] = "version", [RDMACM_REFUSED_PKEY] = "pkey",
    [RDMACM_REFUSED_QKEY] = "qkey", [RDMACM_REFUSED_ICRC] = "icrc",
    [RDMACM_REFUSED_SHORT_RECEIVE] = "receive too short",
};

/* Append an item, which is taken over. The list is gone with an exception. */
static void append(PyObject **list, PyObject *item) {
    if (*list && (!item || PyList_Append(*list, item) < 0))
        Py_CLEAR(*list);
    Py_XDECREF(item);
}

static PyObject *port_take_strays(Port *self, PyObject *Py_UNUSED(ignored)) {
    struct rdmacm_port *port = self->port;
    unsigned long counts[RDMACM_STRAYS] = {0};
    if (!port)
        Py_RETURN_NONE;
    enter_core();
    bool has_any = rdmacm_port_has_strays(port);
    if (has_any) {
        memcpy(counts, port->strays, sizeof counts);
        memset(port->strays, 0, sizeof port->strays);
    }
    rdmacm_leave();
    if (!has_any)
        Py_RETURN_NONE;
    PyObject *strays = PyList_New(0), *refused = PyList_New(0);
    for (int i = 0; i < RDMACM_STRAYS; i++)
        if (counts[i])
            append(&strays,
                   Py_BuildValue("Osk", i < RDMACM_SHORT_TRAIN ? Py_True : Py_False, stray_names[i], counts[i]));
    for (;;) {
        unsigned long of_one[RDMACM_REFUSALS];
        enter_core();
        struct rdmacm_known *known = port->refusing;
        uint32_t qp_num = 0;
        if (known) {
            port->refusing = known->next;
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
                append(&refused, Py_BuildValue("Isk", qp_num, refusal_names[i], of_one[i]));
    }
    if (strays && refused)
        return Py_BuildValue("NN", strays, refused);
    Py_XDECREF(strays);
    Py_XDECREF(refused);
    return NULL;
}

/* What is taken at a time. */
enum { MOST_EVENTS = 32 };

struct event {
    PyObject *owner; /* a new reference */
    unsigned events;
    bool has_deadline;
    double deadline;
    struct counts counts;
};

/* The mutex is held, and the interpreter's lock. */
static size_t pop_events(struct rdmacm_port *port, struct event *found) {
    size_t count = 0;
    for (struct rdmacm_conn *conn; count < MOST_EVENTS && (conn = port->events); count++) {
        port->events = conn->next_event;
        conn->in_events = false;
        struct event *event = &found[count];
        event->owner = Py_NewRef((PyObject *)conn->owner);
        event->events = conn->events;
        conn->events = 0;
        if (event->events & RDMACM_EVENT_TIMER)
            conn->has_timer = true;
        event->has_deadline = conn->rc && conn->rc->has_deadline;
        event->deadline = event->has_deadline ? conn->rc->deadline : 0;
        if (conn->ud)
            pop_ud_counts(conn->ud, &event->counts);
        else
            pop_counts(conn->rc, &event->counts);
    }
    return count;
}

static PyObject *port_take_events(Port *self, PyObject *Py_UNUSED(ignored)) {
    PyObject *list = PyList_New(0);
    struct event found[MOST_EVENTS];
    size_t count = MOST_EVENTS;
    while (list && self->port && count == MOST_EVENTS) {
        enter_core();
        count = pop_events(self->port, found);
        rdmacm_leave();
        for (size_t i = 0; i < count; i++) {
            const struct event *event = &found[i];
            PyObject *deadline = event->has_deadline ? PyFloat_FromDouble(event->deadline) : Py_NewRef(Py_None);
            PyObject *item = Py_BuildValue("OINN", event->owner, event->events, deadline, list_counts(&event->counts));
            if (list && (!item || PyList_Append(list, item) < 0))
                Py_CLEAR(list);
            Py_XDECREF(item);
            Py_DECREF(event->owner);
        }
    }
    return list;
}

static PyObject *port_take_added(Port *self, PyObject *Py_UNUSED(ignored)) {
    PyObject *list = PyList_New(0);
    while (list && self->port) {
        enter_core();
        struct rdmacm_cq *cq = self->port->added;
        PyObject *owner = NULL;
        bool solicited = false, overrun = false;
        if (cq) {
            self->port->added = cq->next_added;
            cq->is_listed = false;
            solicited = cq->solicited, overrun = cq->overrun;
            cq->solicited = false;
            owner = Py_XNewRef(((CompletionQueue *)cq->owner)->owner);
        }
        rdmacm_leave();
        if (!cq)
            break;
        if (!owner)
            continue;
        PyObject *item = Py_BuildValue("NOO", owner, solicited ? Py_True : Py_False, overrun ? Py_True : Py_False);
        if (!item || PyList_Append(list, item) < 0)
            Py_CLEAR(list);
        Py_XDECREF(item);
    }
    return list;
}

/* -- fields of a port ------------------------------------------------------------------------------------------------ */

/* A getter: `value` of self->port, 0 without one. */
#define GETTER(name, type, value, convert)                                                                             \
    static PyObject *name(Port *self, void *Py_UNUSED(closure)) {                                                      \
        type found = 0;                                                                                                \
        if (self->port) {                                                                                              \
            enter_core();                                                                                              \
            found = (value);                                                                                           \
            rdmacm_leave();                                                                                            \
        }                                                                                                              \
        return convert(found);                                                                                         \
    }

GETTER(get_is_enabled, bool, self->port->is_enabled, PyBool_FromLong)
GETTER(get_may_defer_acks, bool, self->port->may_defer_acks, PyBool_FromLong)
/* Whether it reads the sockets for Python. */
GETTER(get_is_active, bool, self->port->is_enabled && self->port->conns_count, PyBool_FromLong)
GETTER(get_has_arrivals, bool, self->port->arrivals, PyBool_FromLong)
/* Whether see_port() of the owner has something to take. */
GETTER(get_has_work, bool, rdmacm_port_has_strays(self->port) || self->port->has_counts || self->port->events ||
                               self->port->added, PyBool_FromLong)
/* Whether the owner has to come back soon: more has to be sent, or packets wait for it. */
GETTER(get_has_more, bool, self->port->ready || self->port->arrivals, PyBool_FromLong)
GETTER(get_is_served, bool, self->port->service, PyBool_FromLong)
GETTER(get_taken, uint64_t, self->port->taken, PyLong_FromUnsignedLongLong)
GETTER(get_deferrals, uint64_t, self->port->deferrals, PyLong_FromUnsignedLongLong)

static int set_is_enabled(Port *self, PyObject *value, void *Py_UNUSED(closure)) {
    struct rdmacm_port *port = self->port;
    if (port) {
        bool is_enabled = value && PyObject_IsTrue(value) > 0;
        take_lock(self->lock);
        PyThreadState *state = begin_core();
        /* What the core has to send leaves before a tap is there, which sees all that follows. */
        rdmacm_port_acknowledge(port, rdmacm_now());
        while (port->ready)
            rdmacm_port_take_turns(port, rdmacm_now());
        port->is_enabled = is_enabled;
        end_core(state);
        rdmacm_lock_release(&self->lock->lock);
    }
    return 0;
}

static int set_may_defer_acks(Port *self, PyObject *value, void *Py_UNUSED(closure)) {
    if (self->port) {
        bool may = value && PyObject_IsTrue(value) > 0;
        enter_core();
        self->port->may_defer_acks = may;
        rdmacm_leave();
    }
    return 0;
}

static PyObject *get_calls(Port *self, void *Py_UNUSED(closure)) {
    return PyLong_FromUnsignedLongLong(self->port ? atomic_load(&self->port->calls) : 0);
}

static PyGetSetDef port_getset[] = {
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

static PyMemberDef port_members[] = {
    {"is_processing", T_BOOL, offsetof(Port, is_processing), 0, NULL},
    {"is_background", T_BOOL, offsetof(Port, is_background), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyMethodDef port_methods[] = {
    {"open", (PyCFunction)port_open, METH_O,
     "open(poll_fd): the epoll descriptor of all that the owner reads; one that is readable when it has to look here."},
    {"serve", (PyCFunction)port_serve, METH_NOARGS, "Have a thread serve the peers; True if it is new."},
    {"clear_signal", (PyCFunction)port_clear_signal, METH_NOARGS, "The owner has looked at that descriptor."},
    {"close", (PyCFunction)port_close, METH_NOARGS, "Let go of the connections and of the sockets, which stay open."},
    {"abandon", (PyCFunction)port_abandon, METH_NOARGS, "In a child of fork(2): do nothing any more."},
    {"add_source", (PyCFunction)port_add_source, METH_O, "add_source(fd): read a UDP socket."},
    {"receive", (PyCFunction)port_receive, METH_O, "receive(fd): read a socket; the number of datagrams."},
    {"acknowledge", (PyCFunction)port_acknowledge, METH_NOARGS, "Send the ACKs that wait."},
    {"begin_turn", (PyCFunction)port_begin_turn, METH_NOARGS,
     "Before the sockets are read: end_arrivals() and acknowledge(); returns `taken`."},
    {"end_turn", (PyCFunction)(void (*)(void))port_end_turn, METH_FASTCALL,
     "end_turn(has_result, taken): after that, send more, and the ACKs, unless they may be deferred. Whether the core\n"
     "has taken packets since begin_turn() returned `taken`, or has still more to send."},
    {"take_arrivals", (PyCFunction)port_take_arrivals, METH_NOARGS,
     "What was not processed: (data, segment, (address, port, flow, scope), local, traffic class, hop limit)."},
    {"end_arrivals", (PyCFunction)port_end_arrivals, METH_NOARGS, "Those that were taken have been processed."},
    {"take_counts", (PyCFunction)port_take_counts, METH_NOARGS,
     "Packets lost: (errno, count); -1 stands for no room, -2 for trains that were cut, -3 for packets dropped."},
    {"set_slots", (PyCFunction)port_set_slots, METH_O,
     "set_slots(slots): those of this process, if it shares the port with others; else None."},
    {"accept", (PyCFunction)port_accept, METH_VARARGS,
     "accept(qp_num, whose, remote, local, scope): a queue pair accepts packets of all (0), of nobody (1), or those\n"
     "between two addresses (2)."},
    {"forget", (PyCFunction)port_forget, METH_O, "forget(qp_num): there is no such queue pair any more."},
    {"take_strays", (PyCFunction)port_take_strays, METH_NOARGS,
     "Packets dropped: (of the wire, reason, count) and (qp_num, reason, count); None: there were none."},
    {"take_events", (PyCFunction)port_take_events, METH_NOARGS, "(owner, events, deadline, counts) of connections."},
    {"take_added", (PyCFunction)port_take_added, METH_NOARGS, "(owner, solicited, overrun) of queues."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot port_slots[] = {
    {Py_tp_doc, (void *)(uintptr_t) "Port(lock, on_events, sleepers): the sockets of a wire (docs/core.md)."},
    {Py_tp_new, (void *)(uintptr_t)port_new},
    {Py_tp_traverse, (void *)(uintptr_t)port_traverse},
    {Py_tp_clear, (void *)(uintptr_t)port_clear},
    {Py_tp_dealloc, (void *)(uintptr_t)port_dealloc},
    {Py_tp_getset, port_getset},
    {Py_tp_members, port_members},
    {Py_tp_methods, port_methods},
    {0, NULL},
};

static PyType_Spec port_spec = {
    .name = "rdmacm.proto._core.Port",
    .basicsize = sizeof(Port),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = port_slots,
};

bool port_init(PyObject *module) {
    lock_type = (PyTypeObject *)PyType_FromSpec(&lock_spec);
    port_type = (PyTypeObject *)PyType_FromSpec(&port_spec);
    return lock_type && port_type && PyModule_AddObjectRef(module, "Lock", (PyObject *)lock_type) == 0 &&
           PyModule_AddObjectRef(module, "Port", (PyObject *)port_type) == 0 && connection_init(module);
}
