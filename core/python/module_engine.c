/* Glue: what the engines of connections and of datagram queue pairs have in common. What module_memory.c says about locks
 * and memory is true here. */
#include "module.h"

#include <string.h>

struct rdmacm_out built;

/* -- the object ------------------------------------------------------------------------------------------------------ */

static bool set_memory(Engine *self, PyObject *memory) {
    self->regions = PyObject_GetAttrString(memory, "regions");
    self->pd = self->regions ? PyObject_GetAttr(memory, names.pd) : NULL;
    if (!self->pd)
        return false;
    if (Py_TYPE(self->regions) != regions_type) {
        PyErr_SetString(PyExc_TypeError, "memory without regions of the core");
        return false;
    }
    self->queues.regions = &((Regions *)self->regions)->regions;
    self->queues.pd = (uint64_t)(uintptr_t)self->pd;
    return true;
}

static bool set_shared(Engine *self, PyObject *shared) {
    if (shared == Py_None)
        return true;
    self->shared = PyObject_TypeCheck(shared, shared_type) ? Py_NewRef(shared) : PyObject_GetAttrString(shared, "core");
    if (self->shared && !PyObject_TypeCheck(self->shared, shared_type))
        PyErr_SetString(PyExc_TypeError, "a shared receive queue of the core is wanted");
    if (PyErr_Occurred())
        return false;
    self->queues.srq = &((SharedReceives *)self->shared)->srq;
    return true;
}

bool engine_set(Engine *self, PyObject *memory, PyObject *shared, PyObject *counters) {
    self->counters = Py_NewRef(counters);
    self->completed = PyList_New(0);
    self->srqns = PyList_New(0);
    return self->completed && self->srqns && set_memory(self, memory) && set_shared(self, shared);
}

int engine_traverse(Engine *self, visitproc visit, void *arg) {
    struct rdmacm_queues *queues = &self->queues;
    Py_VISIT(Py_TYPE((PyObject *)self));
    ENGINE_OBJECTS(VISIT_OBJECT)
    if (self->is_shared) /* another thread may change the queues now */
        return 0;
    for (size_t i = 0; i < queues->sends_count; i++)
        Py_VISIT(owner_of(RDMACM_RING_AT(queues, sends, i)->pin));
    for (size_t i = 0; i < queues->recvs_count; i++)
        Py_VISIT(owner_of(RDMACM_RING_AT(queues, recvs, i)->pin));
    for (size_t i = 0; i < queues->completions.count; i++)
        Py_VISIT(owner_of(queues->completions.items[i].pin));
    if (queues->current_recv.pin)
        Py_VISIT(owner_of(queues->current_recv.pin));
    return 0;
}

int engine_clear(Engine *self) {
    struct rdmacm_queues *queues = &self->queues;
    if (self->is_shared) /* its wire's queue pair is garbage as well, and will let go of it */
        return 0;
    queues->failed = true; /* it takes nothing more */
    queues->regions = NULL;
    queues->srq = NULL;
    if (queues->transport != RDMACM_UD) {
        self->rc.domain = NULL;
        self->rc.outstanding_count = self->rc.send_index = 0;
    }
    ENGINE_OBJECTS(CLEAR_OBJECT)
    /* Each queue is shorter before a pin ends, which may run other code. */
    while (queues->sends_count)
        drop_pin(RDMACM_RING_AT(queues, sends, --queues->sends_count)->pin);
    while (queues->recvs_count)
        drop_pin(RDMACM_RING_AT(queues, recvs, --queues->recvs_count)->pin);
    while (queues->completions.count)
        drop_pin(queues->completions.items[--queues->completions.count].pin);
    void *pin = queues->current_recv.pin;
    queues->current_recv = (struct rdmacm_recv){0};
    if (pin)
        drop_pin(pin);
    return 0;
}

void engine_dealloc(Engine *self) {
    PyObject_GC_UnTrack(self);
    engine_clear(self);
    if (!self->is_shared) { /* else it is of an abandoned wire */
        if (self->queues.transport == RDMACM_UD)
            rdmacm_queues_free(&self->queues);
        else
            rdmacm_rc_free(&self->rc);
    }
    free_object((PyObject *)self);
}

/* -- results --------------------------------------------------------------------------------------------------------- */

/* Names in EngineCounters (proto/engine.py): of its counter and of the count there. */
static const struct {
    const char *counter, *name;
} count_names[RDMACM_COUNTS] = {
    [RDMACM_TIMEOUTS] = {"errors", "local_ack_timeout_err"},
    [RDMACM_RETRIES] = {"errors", "completer_retry_err"},
    [RDMACM_SEQUENCE_NAKS] = {"errors", "rcvd_seq_err"},
    [RDMACM_RNR_NAKS] = {"errors", "rcvd_rnr_err"},
    [RDMACM_IMPLIED_NAKS] = {"errors", "implied_nak_seq_err"},
    [RDMACM_EARLY_REQUESTS] = {"errors", "out_of_seq_request"},
    [RDMACM_DROPPED_SEQUENCE] = {"dropped", "sequence"},
    [RDMACM_DROPPED_DUPLICATES] = {"dropped", "duplicate"},
    [RDMACM_DROPPED_NOT_READY] = {"dropped", "not ready"},
    [RDMACM_DROPPED_REFUSED] = {"dropped", "refused"},
    [RDMACM_DROPPED_ANSWERS] = {"dropped", "answer"},
    [RDMACM_RETRIES_EXCEEDED] = {"errors", "retry_exceeded_err"},
    [RDMACM_RNR_RETRIES_EXCEEDED] = {"errors", "retry_rnr_exceeded_err"},
};

const char *const refusal_names[RDMACM_REFUSALS] = {
    [RDMACM_REFUSED_LENGTH] = "length", [RDMACM_REFUSED_OPCODE] = "opcode",
    [RDMACM_REFUSED_VERSION] = "version", [RDMACM_REFUSED_QPN] = "qpn",
    [RDMACM_REFUSED_STATE] = "state",     [RDMACM_REFUSED_PKEY] = "pkey",
    [RDMACM_REFUSED_QKEY] = "qkey", [RDMACM_REFUSED_ICRC] = "icrc",
    [RDMACM_REFUSED_NO_RECEIVE] = "no receive",
    [RDMACM_REFUSED_SHORT_RECEIVE] = "receive too short",
};

static PyObject *list_counted(const struct rdmacm_counts *counts, const uint32_t *refused) {
    PyObject *list = PyList_New(0);
    for (size_t i = 0; list && i < RDMACM_COUNTS; i++)
        if (counts->of[i])
            append(&list, Py_BuildValue("ssI", count_names[i].counter, count_names[i].name, counts->of[i]));
    for (size_t i = 0; list && refused && i < RDMACM_REFUSALS; i++)
        if (refused[i])
            append(&list, Py_BuildValue("ssI", "dropped", refusal_names[i], refused[i]));
    return list;
}

PyObject *list_counts(const struct rdmacm_counts *counts) { return list_counted(counts, NULL); }

struct rdmacm_counts pop_counts(struct rdmacm_queues *queues) {
    struct rdmacm_counts counts = queues->counts;
    queues->counts = (struct rdmacm_counts){0};
    return counts;
}

void collect(Engine *self, struct results *results) {
    struct rdmacm_queues *queues = &self->queues;
    results->completions = move_completions(&queues->completions, &results->completions_count);
    results->has_counts = queues->counts.has_any || queues->has_refused;
    if (!results->has_counts)
        return;
    results->counts = pop_counts(queues);
    memcpy(results->refused, queues->refused, sizeof queues->refused);
    memset(queues->refused, 0, sizeof queues->refused);
    queues->has_refused = false;
}

bool pass_on(Engine *self, struct results *results) {
    bool done = true;
    for (size_t i = 0; done && self->domain && i < results->completions_count; i++) {
        PyObject *number = PyLong_FromUnsignedLong(results->completions[i].srqn);
        done = number && PyList_Append(self->srqns, number) == 0;
        Py_XDECREF(number);
    }
    uint32_t qp_num = self->queues.qp_num;
    done = append_wcs(self->completed, results->completions, results->completions_count, qp_num) && done;
    if (!done || !results->has_counts)
        return done;
    PyObject *list = list_counted(&results->counts, results->refused);
    PyObject *result = list ? PyObject_CallMethod(self->counters, "add", "O", list) : NULL;
    Py_XDECREF(list);
    Py_XDECREF(result);
    return result;
}

PyObject *pass_on_none(Engine *self, struct results *results) {
    return pass_on(self, results) ? Py_NewRef(Py_None) : NULL;
}

PyObject *pass_on_list(Engine *self, struct results *results, PyObject *list) {
    if (!pass_on(self, results))
        Py_CLEAR(list);
    return list;
}

PyObject *pass_on_posted(Engine *self, struct results *results, bool is_done) {
    return pass_on(self, results) && is_done ? Py_NewRef(Py_None) : NULL;
}

/* -- requests -------------------------------------------------------------------------------------------------------- */

PyObject *engine_post_recv(Engine *self, PyObject *work) {
    struct results results;
    struct pin *pin = pin_recv_work(work);
    bool done;
    if (!pin)
        return PyErr_Occurred() ? NULL : PyErr_Format(PyExc_ValueError, "too many elements, or a wrong key: %R", work);
    struct rdmacm_recv recv = {.pin = pin, .memory = pin->memory};
    ENGINE_DO(self, done = rdmacm_post_recv(&self->queues, &recv); collect(self, &results));
    if (!keep_pin(pin, done))
        PyErr_NoMemory();
    return pass_on_posted(self, &results, done);
}

PyObject *engine_look_up_again(Engine *self, PyObject *args) {
    unsigned int lkey;
    PyObject *look_up;
    if (!PyArg_ParseTuple(args, "IO", &lkey, &look_up))
        return NULL;
    ENGINE_DO(self, rdmacm_look_up_again(&self->queues, lkey));
    Py_RETURN_NONE;
}

PyObject *engine_pause(Engine *self, PyObject *Py_UNUSED(ignored)) {
    ENGINE_DO(self, self->queues.paused = true);
    Py_RETURN_NONE;
}

/* SQD or SQE to RTS. */
PyObject *engine_resume(Engine *self, PyObject *Py_UNUSED(ignored)) {
    ENGINE_DO(self, self->queues.paused = self->queues.send_failed = false);
    Py_RETURN_NONE;
}

static void flush(Engine *self) {
    if (self->queues.transport == RDMACM_UD)
        rdmacm_ud_flush(&self->ud);
    else
        rdmacm_rc_flush(&self->rc);
}

PyObject *engine_flush(Engine *self, PyObject *Py_UNUSED(ignored)) {
    struct results results;
    ENGINE_DO(self, flush(self); collect(self, &results));
    return pass_on_none(self, &results);
}

/* -- packets --------------------------------------------------------------------------------------------------------- */

/* The bytes of a datagram. This never runs the collector, which might run code that uses `built`. */
static PyObject *join_pieces(const struct rdmacm_datagram *datagram) {
    PyObject *bytes = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)datagram->bytes);
    if (!bytes)
        return NULL;
    char *p = PyBytes_AsString(bytes);
    for (size_t i = datagram->first; i < datagram->first + datagram->count; i++) {
        memcpy(p, built.pieces[i].iov_base, built.pieces[i].iov_len);
        p += built.pieces[i].iov_len;
    }
    return bytes;
}

size_t copy_datagrams(PyObject *route, struct made *made) {
    size_t done = 0;
    for (; done < built.datagrams_count; done++) {
        made[done].bytes = join_pieces(&built.datagrams[done]);
        if (!made[done].bytes)
            break;
        made[done].route = Py_XNewRef(route);
        made[done].segment = (Py_ssize_t)built.datagrams[done].segment;
    }
    return done;
}

PyObject *copy_datagram(void) { return join_pieces(built.datagrams); }

PyObject *list_datagrams(const struct made *made, size_t count, bool is_complete) {
    PyObject *list = is_complete ? PyList_New((Py_ssize_t)count) : NULL;
    for (size_t i = 0; i < count; i++) {
        PyObject *route = made[i].route, *bytes = made[i].bytes, *item = NULL;
        if (list)
            item = route ? Py_BuildValue("O[O]n", route, bytes, made[i].segment)
                         : Py_BuildValue("[O]n", bytes, made[i].segment);
        Py_XDECREF(route);
        Py_DECREF(bytes);
        if (item)
            PyList_SetItem(list, (Py_ssize_t)i, item);
        else
            Py_CLEAR(list);
    }
    return list;
}
