/* Glue: the fields and queues of a connection. What module_memory.c says about locks and memory is true here. */
#include "module.h"

#include <string.h>

PyTypeObject *core_type;
struct rdmacm_out built;

/* -- a connection ---------------------------------------------------------------------------------------------------- */

static PyObject *core_new(PyTypeObject *type, PyObject *Py_UNUSED(args), PyObject *Py_UNUSED(keywords)) {
    RcCore *self = new_object(type);
    if (self)
        rdmacm_rc_init(&self->rc);
    return (PyObject *)self;
}

static int core_traverse(RcCore *self, visitproc visit, void *arg) {
    struct rdmacm_rc *rc = &self->rc;
    Py_VISIT(Py_TYPE((PyObject *)self));
    Py_VISIT(self->regions);
    Py_VISIT(self->pd);
    if (self->is_shared) /* another thread may change the queues now */
        return 0;
    for (size_t i = 0; i < rc->sends_count; i++)
        Py_VISIT(owner_of(RDMACM_RING_AT(rc, sends, i)->pin));
    for (size_t i = 0; i < rc->recvs_count; i++)
        Py_VISIT(owner_of(RDMACM_RING_AT(rc, recvs, i)->pin));
    for (size_t i = 0; i < rc->completions.count; i++)
        Py_VISIT(owner_of(rc->completions.items[i].pin));
    if (rc->current_recv.pin)
        Py_VISIT(owner_of(rc->current_recv.pin));
    return 0;
}

static int core_clear(RcCore *self) {
    struct rdmacm_rc *rc = &self->rc;
    if (self->is_shared) /* its connection is garbage as well, and will let go of it */
        return 0;
    rc->core_owns_queues = false;
    rc->regions = NULL;
    Py_CLEAR(self->regions);
    Py_CLEAR(self->pd);
    /* Each queue is empty before a pin ends, which may run other code. */
    while (rc->sends_count)
        drop_pin(RDMACM_RING_AT(rc, sends, --rc->sends_count)->pin);
    rc->outstanding_count = rc->send_index = 0;
    while (rc->recvs_count)
        drop_pin(RDMACM_RING_AT(rc, recvs, --rc->recvs_count)->pin);
    while (rc->completions.count)
        drop_pin(rc->completions.items[--rc->completions.count].pin);
    void *pin = rc->current_recv.pin;
    rc->current_recv = (struct rdmacm_recv){0};
    if (pin)
        drop_pin(pin);
    return 0;
}

static void core_dealloc(RcCore *self) {
    PyObject_GC_UnTrack(self);
    core_clear(self);
    if (!self->is_shared) /* else it is of an abandoned wire */
        rdmacm_rc_free(&self->rc);
    free_object((PyObject *)self);
}

static PyObject *core_set_flow(RcCore *self, PyObject *args) {
    int incoming, is_ipv6;
    unsigned int base;
    if (!PyArg_ParseTuple(args, "pIp", &incoming, &base, &is_ipv6))
        return NULL;
    struct rdmacm_flow *flow = incoming ? &self->rc.flow_in : &self->rc.flow_out;
    bool is_entered = enter_shared(&self->is_shared);
    flow->base = base;
    flow->is_ipv6 = is_ipv6;
    leave_shared(is_entered);
    Py_RETURN_NONE;
}

static PyObject *core_set_memory(RcCore *self, PyObject *args) {
    PyObject *regions, *pd;
    unsigned long long qp;
    if (!PyArg_ParseTuple(args, "O!OK", regions_type, &regions, &pd, &qp))
        return NULL;
    self->rc.regions = &((Regions *)regions)->regions;
    self->rc.pd = (uint64_t)(uintptr_t)pd;
    self->rc.qp = qp;
    set_object(&self->regions, regions);
    set_object(&self->pd, pd);
    Py_RETURN_NONE;
}

/* Read the progress of a request that has begun. */
static bool read_progress(PyObject *work, struct rdmacm_send *send) {
    return read_uint32(work, names.first_psn, RDMACM_PSN_MASK, &send->first_psn) &&
           read_uint32(work, names.last_psn, RDMACM_PSN_MASK, &send->last_psn) &&
           read_uint32(work, names.length, UINT32_MAX, &send->length) &&
           read_uint32(work, names.received_bytes, UINT32_MAX, &send->received_bytes) &&
           read_uint32(work, names.requested_packets, UINT32_MAX, &send->requested_packets) &&
           (send->opcode != RDMACM_WR_FLUSH || !send->requested_packets ||
            read_truth(work, names.had_icrc_twice, &send->had_icrc_twice));
}

/* Read whether the success of a request makes a completion, and whether the user does not see it. */
static bool read_signaled(PyObject *work, bool *is_signaled, bool *unsignaled) {
    if (!read_truth(work, names.signaled, is_signaled))
        return false;
    *unsignaled = !*is_signaled;
    if (!*is_signaled || !unsignaled_class)
        return true;
    PyObject *wr_id = PyObject_GetAttr(work, names.wr_id);
    *unsignaled = wr_id && (PyObject *)Py_TYPE(wr_id) == unsignaled_class;
    Py_XDECREF(wr_id);
    return wr_id;
}

/* Read what a FLUSH is for. */
static bool read_flush(PyObject *work, struct rdmacm_send *send) {
    PyObject *flush = PyObject_GetAttr(work, names.flush);
    bool done = flush && PyTuple_Check(flush) &&
                PyArg_ParseTuple(flush, "Ibb", &send->length, &send->placement, &send->level);
    Py_XDECREF(flush);
    return done;
}

/* Read the fields of a SendWork that its opcode has. False with an exception, or if one is wrong. */
static bool read_send(PyObject *work, struct rdmacm_send *send) {
    uint8_t kind = rdmacm_request_types[send->opcode].flags, word = rdmacm_request_types[send->opcode].word_kind;
    if (!read_truth(work, names.solicited, &send->solicited) || !read_truth(work, names.fence, &send->fence))
        return false;
    if (word && !read_uint32(work, word == RDMACM_IMMEDIATE ? names.imm : names.invalidate_rkey, UINT32_MAX, &send->word))
        return false;
    if (kind == RDMACM_IS_DATA || kind == RDMACM_IS_LOCAL)
        return true;
    return read_number(work, names.remote_addr, UINT64_MAX, &send->remote_addr) &&
           read_uint32(work, names.rkey, UINT32_MAX, &send->rkey) &&
           (!(kind & RDMACM_IS_ATOMIC) || (read_number(work, names.compare_add, UINT64_MAX, &send->compare_add) &&
                                           read_number(work, names.swap, UINT64_MAX, &send->swap))) &&
           (!(kind & RDMACM_IS_FLUSH) || read_flush(work, send));
}

/* Whether it was queued. False, perhaps with an exception, if it is not one of the core's. */
static bool post_send(RcCore *self, PyObject *work, bool has_begun) {
    struct rdmacm_send send = {0};
    uint64_t opcode;
    bool is_signaled;
    if (!self->rc.core_owns_queues || !read_number(work, names.opcode, UINT8_MAX, &opcode) || !rdmacm_rc_has(opcode) ||
        (rdmacm_request_types[opcode].flags & RDMACM_IS_LOCAL && !self->rc.regions))
        return false;
    send.opcode = (uint8_t)opcode;
    if (!read_send(work, &send) || !read_signaled(work, &is_signaled, &send.unsignaled) ||
        (has_begun && !read_progress(work, &send)))
        return false;
    uint8_t kind = rdmacm_request_types[opcode].flags;
    struct pin *pin = pin_segments(work, kind & (RDMACM_IS_READ | RDMACM_IS_ATOMIC) ? PyBUF_WRITABLE : PyBUF_SIMPLE);
    if (!pin)
        return false;
    if (!pin_bind(pin, work, &send))
        return keep_pin(pin, false);
    pin->unsignaled = !is_signaled;
    send.pin = pin;
    send.memory = pin->memory;
    bool is_entered = enter_shared(&self->is_shared);
    bool done = (has_begun ? rdmacm_rc_adopt_send : rdmacm_rc_post_send)(&self->rc, &send);
    leave_shared(is_entered);
    return keep_pin(pin, done);
}

static PyObject *core_post_send(RcCore *self, PyObject *work) { return answer(post_send(self, work, false)); }

static PyObject *core_adopt_send(RcCore *self, PyObject *work) { return answer(post_send(self, work, true)); }

static PyObject *core_post_recv(RcCore *self, PyObject *work) {
    if (!self->rc.core_owns_queues)
        Py_RETURN_FALSE;
    struct pin *pin = pin_segments(work, PyBUF_WRITABLE);
    if (!pin)
        return answer(false);
    struct rdmacm_recv recv = {.pin = pin, .memory = pin->memory};
    bool is_entered = enter_shared(&self->is_shared);
    bool done = rdmacm_rc_post_recv(&self->rc, &recv);
    leave_shared(is_entered);
    return answer(keep_pin(pin, done));
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

static PyObject *core_take(RcCore *self, PyObject *args) {
    Py_buffer data;
    Py_ssize_t segment;
    double now;
    PyObject *completed;
    if (!PyArg_ParseTuple(args, "y*ndO!", &data, &segment, &now, &PyList_Type, &completed))
        return NULL;
    size_t accepted, size = (size_t)data.len;
    int32_t first;
    enter_core(); /* also where no wire uses it: memory windows may be used, bound or invalidated */
    size_t taken = rdmacm_rc_take(&self->rc, &self->rc.flow_in, data.buf, size, segment > 0 ? (size_t)segment : 0, now,
                                  &accepted, &first);
    self->rc.counts.has_any |= self->rc.has_refused;
    size_t count;
    struct rdmacm_completion *completions = move_completions(&self->rc.completions, &count);
    rdmacm_leave();
    PyBuffer_Release(&data);
    if (!append_wcs(completed, completions, count, self->rc.qp_num))
        return NULL;
    if (taken == size)
        return PyLong_FromSize_t(accepted);
    return Py_BuildValue("nni", (Py_ssize_t)taken, (Py_ssize_t)accepted, (int)first);
}

static PyObject *core_build(RcCore *self, PyObject *args) {
    double now;
    Py_ssize_t limit, train;
    PyObject *completed;
    if (!PyArg_ParseTuple(args, "dnnO!", &now, &limit, &train, &PyList_Type, &completed))
        return NULL;
    struct made made[RDMACM_BUILD_LIMIT];
    enter_core(); /* as in core_take() */
    rdmacm_rc_build(&self->rc, &built, limit > 0 ? (size_t)limit : 0, train > 0 ? (size_t)train : 0, now);
    size_t count = copy_datagrams(NULL, made);
    bool is_complete = count == built.datagrams_count;
    size_t wcs = 0;
    struct rdmacm_completion *completions = is_complete ? move_completions(&self->rc.completions, &wcs) : NULL;
    rdmacm_leave();
    bool is_right = append_wcs(completed, completions, wcs, self->rc.qp_num);
    return list_datagrams(made, count, is_complete && is_right);
}

static PyObject *core_take_completed(RcCore *self, PyObject *completed) {
    if (!PyList_Check(completed))
        return PyErr_Format(PyExc_TypeError, "a list is wanted");
    size_t count;
    bool is_entered = enter_shared(&self->is_shared);
    struct rdmacm_completion *completions = move_completions(&self->rc.completions, &count);
    leave_shared(is_entered);
    if (!append_wcs(completed, completions, count, self->rc.qp_num))
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *core_timer(RcCore *self, PyObject *argument) {
    double now = PyFloat_AsDouble(argument);
    if (now == -1.0 && PyErr_Occurred())
        return NULL;
    bool is_entered = enter_shared(&self->is_shared);
    rdmacm_rc_timer(&self->rc, now);
    leave_shared(is_entered);
    Py_RETURN_NONE;
}

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
    [RDMACM_DROPPED_NO_RECEIVE] = {"dropped", "no receive"},
};

const char *const refusal_names[RDMACM_REFUSALS] = {
    [RDMACM_REFUSED_LENGTH] = "length", [RDMACM_REFUSED_OPCODE] = "opcode",
    [RDMACM_REFUSED_VERSION] = "version", [RDMACM_REFUSED_QPN] = "qpn",
    [RDMACM_REFUSED_STATE] = "state",     [RDMACM_REFUSED_PKEY] = "pkey",
    [RDMACM_REFUSED_QKEY] = "qkey", [RDMACM_REFUSED_ICRC] = "icrc",
    [RDMACM_REFUSED_SHORT_RECEIVE] = "receive too short",
};

PyObject *list_counts(const struct rdmacm_counts *counts) {
    PyObject *list = PyList_New(0);
    for (size_t i = 0; list && i < RDMACM_COUNTS; i++)
        if (counts->of[i])
            append(&list, Py_BuildValue("ssI", count_names[i].counter, count_names[i].name, counts->of[i]));
    return list;
}

static PyObject *core_take_counts(RcCore *self, PyObject *Py_UNUSED(ignored)) {
    bool is_entered = enter_shared(&self->is_shared);
    struct rdmacm_counts counts = self->rc.counts;
    uint32_t refused[RDMACM_REFUSALS];
    memcpy(refused, self->rc.refused, sizeof refused);
    self->rc.counts = (struct rdmacm_counts){0};
    memset(self->rc.refused, 0, sizeof self->rc.refused);
    self->rc.has_refused = false;
    leave_shared(is_entered);
    PyObject *list = list_counts(&counts);
    for (size_t i = 0; list && i < RDMACM_REFUSALS; i++)
        if (refused[i])
            append(&list, Py_BuildValue("ssI", "dropped", refusal_names[i], refused[i]));
    return list;
}

static PyObject *core_to_send(RcCore *self, PyObject *Py_UNUSED(ignored)) {
    bool is_entered = enter_shared(&self->is_shared);
    int to_send = rdmacm_rc_to_send(&self->rc);
    leave_shared(is_entered);
    return PyLong_FromLong(to_send);
}

static PyObject *core_begin(RcCore *self, PyObject *send_index) {
    size_t index = PyLong_AsSize_t(send_index);
    if (index == (size_t)-1 && PyErr_Occurred())
        return NULL;
    bool is_entered = enter_shared(&self->is_shared);
    bool done = rdmacm_rc_begin(&self->rc);
    if (done) {
        self->rc.is_held = true;
        self->rc.send_index = index;
    }
    leave_shared(is_entered);
    return PyBool_FromLong(done);
}

static PyObject *core_filled(RcCore *self, PyObject *Py_UNUSED(ignored)) {
    bool is_entered = enter_shared(&self->is_shared);
    self->rc.is_held = false;
    leave_shared(is_entered);
    Py_RETURN_NONE;
}

static bool set_number(PyObject *object, PyObject *name, uint32_t value) {
    PyObject *number = PyLong_FromUnsignedLong(value);
    bool done = number && PyObject_SetAttr(object, name, number) == 0;
    Py_XDECREF(number);
    return done;
}

/* The SendWork of a request, with its progress if it has begun: a new reference. */
static PyObject *work_with_progress(const struct rdmacm_send *send, bool has_begun) {
    PyObject *work = work_of_send(send);
    if (work && has_begun && !(set_number(work, names.length, send->length) &&
                               set_number(work, names.first_psn, send->first_psn) &&
                               set_number(work, names.last_psn, send->last_psn) &&
                               set_number(work, names.received_bytes, send->received_bytes) &&
                               set_number(work, names.requested_packets, send->requested_packets) &&
                               PyObject_SetAttr(work, names.had_icrc_twice, send->had_icrc_twice ? Py_True : Py_False) == 0))
        Py_CLEAR(work);
    return work;
}

static PyObject *end_sends(struct rdmacm_rc *rc) {
    PyObject *list = PyList_New(0);
    while (list && rc->sends_count) {
        struct rdmacm_send send = *RDMACM_RING_AT(rc, sends, 0);
        bool has_begun = rc->outstanding_count > 0;
        RDMACM_RING_DROP(rc, sends);
        rc->outstanding_count -= has_begun;
        append(&list, work_with_progress(&send, has_begun));
        drop_pin(send.pin);
    }
    return list;
}

static PyObject *end_recvs(struct rdmacm_rc *rc) {
    PyObject *list = PyList_New(0);
    while (list && rc->recvs_count) {
        struct rdmacm_recv recv = *RDMACM_RING_AT(rc, recvs, 0);
        RDMACM_RING_DROP(rc, recvs);
        append(&list, work_of_recv(&recv));
        drop_pin(recv.pin);
    }
    return list;
}

/* The receive of the SEND in progress, or None. */
static PyObject *end_current(struct rdmacm_rc *rc) {
    struct rdmacm_recv recv = rc->current_recv;
    if (!recv.pin)
        Py_RETURN_NONE;
    rc->current_recv = (struct rdmacm_recv){0};
    PyObject *work = work_of_recv(&recv);
    drop_pin(recv.pin);
    return work;
}

/* (operation, first PSN, packets, R_Key, address, length, original) of a resource. */
static PyObject *make_resource(const struct rdmacm_resource *kept) {
    return Py_BuildValue("iIIIKIK", (int)kept->operation, kept->first_psn,
                         rdmacm_psn_after(kept->last_psn, kept->first_psn) + 1, kept->rkey,
                         (unsigned long long)kept->address, kept->length, (unsigned long long)kept->original);
}

static PyObject *list_resources(const struct rdmacm_rc *rc) {
    PyObject *list = PyList_New(0);
    for (size_t i = 0; list && i < rc->resources_count; i++) {
        size_t at = (rc->resources_next + rc->resources_capacity - rc->resources_count + i) % rc->resources_capacity;
        append(&list, make_resource(&rc->resources[at]));
    }
    return list;
}

static PyObject *list_responses(struct rdmacm_rc *rc) {
    PyObject *list = PyList_New(0);
    for (size_t i = 0; list && i < rc->responses_count; i++) {
        const struct rdmacm_response *response = RDMACM_RING_AT(rc, responses, i);
        PyObject *of = response->of.operation ? make_resource(&response->of) : Py_NewRef(Py_None);
        append(&list, Py_BuildValue("IIIIION", response->psn, response->last_psn, response->offset, response->syndrome,
                                    response->msn, response->is_repeated ? Py_True : Py_False, of));
    }
    return list;
}

static PyObject *core_end(RcCore *self, PyObject *Py_UNUSED(ignored)) {
    struct rdmacm_rc *rc = &self->rc;
    /* From here on the queues are Python's. */
    bool is_entered = enter_shared(&self->is_shared);
    rc->core_owns_queues = rc->is_held = false;
    leave_shared(is_entered);
    size_t outstanding = rc->outstanding_count, send_index = rc->send_index;
    PyObject *sends = end_sends(rc);
    rc->send_index = 0;
    PyObject *recvs = sends ? end_recvs(rc) : NULL;
    PyObject *current = recvs ? end_current(rc) : NULL;
    PyObject *resources = current ? list_resources(rc) : NULL;
    PyObject *responses = resources ? list_responses(rc) : NULL;
    rc->responses_count = rc->unanswered = rc->waiting_flushes = rc->resources_count = 0;
    return Py_BuildValue("NnnNNNN", sends, (Py_ssize_t)outstanding, (Py_ssize_t)send_index, recvs, current, resources,
                         responses);
}

/* -- fields ---------------------------------------------------------------------------------------------------------- */

#define FIELD(name, kind) {#name, kind, offsetof(RcCore, rc.name), 0, NULL}

static PyMemberDef core_members[] = {
    FIELD(core_owns_queues, T_BOOL),
    FIELD(qp_num, T_UINT),
    FIELD(failed, T_BOOL),
    FIELD(path_mtu, T_UINT),
    FIELD(send_bth, T_ULONGLONG),
    FIELD(identification, T_UINT),
    FIELD(flush_icrc_twice, T_BOOL),
    FIELD(has_failed_peer, T_BOOL),
    {"failure_status", T_UBYTE, offsetof(RcCore, rc.failure), 0, NULL},
    FIELD(can_send, T_BOOL),
    FIELD(can_receive, T_BOOL),
    FIELD(paused, T_BOOL),
    FIELD(rnr_waiting, T_BOOL),
    FIELD(retransmitting, T_BOOL),
    FIELD(next_psn, T_UINT),
    FIELD(end_psn, T_UINT),
    FIELD(unacked_psn, T_UINT),
    FIELD(window, T_UINT),
    FIELD(loss_window, T_UINT),
    FIELD(ack_interval, T_UINT),
    FIELD(outstanding_reads, T_UINT),
    FIELD(max_rd_atomic, T_UINT),
    FIELD(retry_cnt, T_INT),
    FIELD(rnr_retry, T_INT),
    FIELD(retries_left, T_INT),
    FIELD(rnr_retries_left, T_INT),
    FIELD(stray_answers, T_UINT),
    FIELD(timeout, T_DOUBLE),
    FIELD(access, T_UINT),
    FIELD(expected_psn, T_UINT),
    FIELD(executed_psn, T_UINT),
    FIELD(msn, T_UINT),
    FIELD(max_dest_rd_atomic, T_UINT),
    FIELD(min_rnr_timer, T_UINT),
    FIELD(nak_sent, T_BOOL),
    FIELD(operation, T_INT),
    FIELD(message_offset, T_ULONGLONG),
    FIELD(recv_capacity, T_ULONGLONG),
    FIELD(ack_psn, T_INT),
    FIELD(ack_aeth, T_UINT),
    {"has_counts", T_BOOL, offsetof(RcCore, rc.counts.has_any), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyObject *get_deadline(RcCore *self, void *Py_UNUSED(closure)) {
    bool is_entered = enter_shared(&self->is_shared);
    bool has_deadline = self->rc.has_deadline;
    double deadline = self->rc.deadline;
    leave_shared(is_entered);
    return has_deadline ? PyFloat_FromDouble(deadline) : Py_NewRef(Py_None);
}

static int set_deadline(RcCore *self, PyObject *value, void *Py_UNUSED(closure)) {
    bool has_deadline = value && value != Py_None;
    double deadline = has_deadline ? PyFloat_AsDouble(value) : 0;
    if (deadline == -1.0 && PyErr_Occurred())
        return -1;
    bool is_entered = enter_shared(&self->is_shared);
    self->rc.has_deadline = has_deadline;
    self->rc.deadline = deadline;
    leave_shared(is_entered);
    return 0;
}

static PyObject *get_write_target(RcCore *self, void *Py_UNUSED(closure)) {
    return Py_BuildValue("IKI", self->rc.write_rkey, (unsigned long long)self->rc.write_address,
                         self->rc.write_length);
}

static int set_write_target(RcCore *self, PyObject *value, void *Py_UNUSED(closure)) {
    unsigned int rkey, length;
    unsigned long long address;
    if (!value || !PyTuple_Check(value)) {
        PyErr_SetString(PyExc_TypeError, "a tuple of R_Key, address and length is wanted");
        return -1;
    }
    if (!PyArg_ParseTuple(value, "IKI", &rkey, &address, &length))
        return -1;
    self->rc.write_rkey = rkey;
    self->rc.write_address = address;
    self->rc.write_length = length;
    return 0;
}

static PyGetSetDef core_getset[] = {
    {"deadline", (getter)get_deadline, (setter)set_deadline, NULL, NULL},
    {"write_target", (getter)get_write_target, (setter)set_write_target, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMethodDef core_methods[] = {
    {"core_set_flow", (PyCFunction)core_set_flow, METH_VARARGS, "core_set_flow(incoming, base, is_ipv6)"},
    {"core_set_memory", (PyCFunction)core_set_memory, METH_VARARGS,
     "core_set_memory(regions, pd, qp): `qp` is the number that stands for the queue pair."},
    {"core_begin", (PyCFunction)core_begin, METH_O,
     "core_begin(send_index): have the queues here, if that is possible, to be filled until core_filled()."},
    {"core_filled", (PyCFunction)core_filled, METH_NOARGS, "The queues have all that was posted."},
    {"core_adopt_send", (PyCFunction)core_adopt_send, METH_O, "core_adopt_send(work): as post, for one that has begun."},
    {"core_end", (PyCFunction)core_end, METH_NOARGS, "Hand the queues back."},
    {"core_post_send", (PyCFunction)core_post_send, METH_O, "core_post_send(work): False if it was not taken."},
    {"core_post_recv", (PyCFunction)core_post_recv, METH_O, "core_post_recv(work): False if it was not taken."},
    {"core_take", (PyCFunction)core_take, METH_VARARGS,
     "core_take(data, segment, now, completed): the packets accepted, if all were processed;\n"
     "else the bytes processed, the packets accepted, and the first identification (-1: none)."},
    {"core_build", (PyCFunction)core_build, METH_VARARGS, "core_build(now, limit, train, completed): datagrams."},
    {"core_take_completed", (PyCFunction)core_take_completed, METH_O,
     "core_take_completed(completed): append the completions that no core_take() has."},
    {"core_timer", (PyCFunction)core_timer, METH_O, "core_timer(now): do what is due."},
    {"core_take_counts", (PyCFunction)core_take_counts, METH_NOARGS,
     "What was counted since the last call: (counter, name, count) of EngineCounters."},
    {"core_to_send", (PyCFunction)core_to_send, METH_NOARGS, "NOTHING, ACK_ONLY or PACKETS."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot core_slots[] = {
    SLOT(tp_doc, "The fields and queues of a reliable connection (docs/core.md)."),
    SLOT(tp_new, core_new),
    SLOT(tp_traverse, core_traverse),
    SLOT(tp_clear, core_clear),
    SLOT(tp_dealloc, core_dealloc),
    SLOT(tp_members, core_members),
    SLOT(tp_getset, core_getset),
    SLOT(tp_methods, core_methods),
    {0, NULL},
};

bool rc_init(PyObject *module) {
    core_type = ADD_TYPE(module, RcCore, Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_BASETYPE, core_slots);
    return core_type && set_fields(core_type, core_members, core_getset);
}
