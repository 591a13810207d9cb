/* Glue: the engine of a connection. What module_memory.c says about locks and memory is true here. */
#include "module.h"

#include <string.h>

PyTypeObject *connected_type;
struct rdmacm_out built;

/* -- the object ------------------------------------------------------------------------------------------------------ */

/* Refer to the memory that the peer may access. */
static bool set_memory(ConnectedEngine *self, PyObject *memory) {
    self->regions = PyObject_GetAttrString(memory, "regions");
    self->pd = self->regions ? PyObject_GetAttr(memory, names.pd) : NULL;
    if (!self->pd)
        return false;
    if (Py_TYPE(self->regions) != regions_type) {
        PyErr_SetString(PyExc_TypeError, "memory without regions of the core");
        return false;
    }
    self->rc.regions = &((Regions *)self->regions)->regions;
    self->rc.pd = (uint64_t)(uintptr_t)self->pd;
    return read_number(memory, names.number, UINT64_MAX, &self->rc.qp);
}

/* Take receives from a shared receive queue, or from its SharedReceives; with None from a queue of its own. */
static bool set_shared(ConnectedEngine *self, PyObject *shared) {
    if (shared == Py_None)
        return true;
    self->shared = PyObject_TypeCheck(shared, shared_type) ? Py_NewRef(shared) : PyObject_GetAttrString(shared, "core");
    if (self->shared && !PyObject_TypeCheck(self->shared, shared_type))
        PyErr_SetString(PyExc_TypeError, "a shared receive queue of the core is wanted");
    if (PyErr_Occurred())
        return false;
    self->rc.srq = &((SharedReceives *)self->shared)->srq;
    return true;
}

/* Be the target of an XRC connection; with None nothing is done. */
static bool set_domain(ConnectedEngine *self, PyObject *domain) {
    if (domain == Py_None)
        return true;
    if (!PyObject_TypeCheck(domain, domain_type) || ((XrcDomain *)domain)->regions != self->regions) {
        PyErr_SetString(PyExc_TypeError, "an XRC domain of the same device is wanted");
        return false;
    }
    self->domain = Py_NewRef(domain);
    self->rc.domain = &((XrcDomain *)domain)->queues;
    return true;
}

static bool is_unreliable(const ConnectedEngine *self) { return self->rc.transport == RDMACM_UC; }

static PyObject *engine_new(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(keywords)) {
    unsigned int qp_num;
    unsigned char transport = RDMACM_RC;
    PyObject *memory, *shared, *counters, *domain = Py_None;
    if (!PyArg_ParseTuple(args, "IOOO|bO", &qp_num, &memory, &shared, &counters, &transport, &domain))
        return NULL;
    if (transport != RDMACM_RC && transport != RDMACM_UC && transport != RDMACM_XRC)
        return PyErr_Format(PyExc_ValueError, "no transport service of connections: %d", transport);
    if (transport == RDMACM_XRC ? shared != Py_None : domain != Py_None)
        return PyErr_Format(PyExc_ValueError, "a target of XRC has a domain, another connection a shared receive queue");
    ConnectedEngine *self = new_object(type);
    if (!self)
        return NULL;
    rdmacm_rc_init(&self->rc, transport, qp_num, NULL);
    self->counters = Py_NewRef(counters);
    self->completed = PyList_New(0);
    self->srqns = PyList_New(0);
    if (!self->completed || !self->srqns || !set_memory(self, memory) || !set_shared(self, shared) ||
        !set_domain(self, domain)) {
        Py_DECREF((PyObject *)self);
        return NULL;
    }
    return (PyObject *)self;
}

static int engine_traverse(ConnectedEngine *self, visitproc visit, void *arg) {
    struct rdmacm_rc *rc = &self->rc;
    Py_VISIT(Py_TYPE((PyObject *)self));
    Py_VISIT(self->completed);
    Py_VISIT(self->counters);
    Py_VISIT(self->regions);
    Py_VISIT(self->pd);
    Py_VISIT(self->shared);
    Py_VISIT(self->domain);
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

static int engine_clear(ConnectedEngine *self) {
    struct rdmacm_rc *rc = &self->rc;
    if (self->is_shared) /* its connection is garbage as well, and will let go of it */
        return 0;
    rc->failed = true; /* it takes nothing more */
    rc->regions = NULL;
    rc->srq = NULL;
    rc->domain = NULL;
    Py_CLEAR(self->completed);
    Py_CLEAR(self->counters);
    Py_CLEAR(self->regions);
    Py_CLEAR(self->pd);
    Py_CLEAR(self->shared);
    Py_CLEAR(self->domain);
    Py_CLEAR(self->srqns);
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

static void engine_dealloc(ConnectedEngine *self) {
    PyObject_GC_UnTrack(self);
    engine_clear(self);
    if (!self->is_shared) /* else it is of an abandoned wire */
        rdmacm_rc_free(&self->rc);
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

/* What the engine has completed and counted. */
struct results {
    struct rdmacm_completion *completions;
    size_t completions_count;
    bool has_counts;
    struct rdmacm_counts counts;
    uint32_t refused[RDMACM_REFUSALS];
};

/* Take them, in the same step as the call that made them. */
static void collect(ConnectedEngine *self, struct results *results) {
    struct rdmacm_rc *rc = &self->rc;
    results->completions = move_completions(&rc->completions, &results->completions_count);
    results->has_counts = rc->counts.has_any || rc->has_refused;
    if (!results->has_counts)
        return;
    results->counts = rc->counts;
    memcpy(results->refused, rc->refused, sizeof rc->refused);
    rc->counts = (struct rdmacm_counts){0};
    memset(rc->refused, 0, sizeof rc->refused);
    rc->has_refused = false;
}

/* Pass them on to Python. False with an exception. */
static bool pass_on(ConnectedEngine *self, struct results *results) {
    bool done = true;
    for (size_t i = 0; done && self->domain && i < results->completions_count; i++) {
        PyObject *number = PyLong_FromUnsignedLong(results->completions[i].srqn);
        done = number && PyList_Append(self->srqns, number) == 0;
        Py_XDECREF(number);
    }
    done = append_wcs(self->completed, results->completions, results->completions_count, self->rc.qp_num) && done;
    if (!done || !results->has_counts)
        return done;
    PyObject *list = list_counted(&results->counts, results->refused);
    PyObject *result = list ? PyObject_CallMethod(self->counters, "add", "O", list) : NULL;
    Py_XDECREF(list);
    Py_XDECREF(result);
    return result;
}

/* End a call that returns nothing. */
static PyObject *pass_on_none(ConnectedEngine *self, struct results *results) {
    return pass_on(self, results) ? Py_NewRef(Py_None) : NULL;
}

/* -- the path and the states ----------------------------------------------------------------------------------------- */

static PyObject *engine_set_route(ConnectedEngine *self, PyObject *args) {
    const char *local, *remote;
    Py_ssize_t local_length, remote_length;
    int port;
    if (!PyArg_ParseTuple(args, "y#y#i", &local, &local_length, &remote, &remote_length, &port))
        return NULL;
    if (local_length != remote_length || (local_length != 4 && local_length != 16))
        return PyErr_Format(PyExc_ValueError, "an address has 4 or 16 bytes, and both have the same family");
    self->address_length = (size_t)local_length;
    memcpy(self->local, local, self->address_length);
    memcpy(self->remote, remote, self->address_length);
    bool is_entered = enter_shared(&self->is_shared);
    rdmacm_flow_init(&self->rc.flow_out, self->local, self->remote, self->address_length, (uint16_t)port,
                     RDMACM_ROCE_PORT);
    leave_shared(is_entered);
    Py_RETURN_NONE;
}

static PyObject *engine_set_peer_port(ConnectedEngine *self, PyObject *argument) {
    uint64_t port;
    if (!number_of(argument, UINT16_MAX, &port) || !self->address_length)
        return PyErr_Format(PyExc_ValueError, "a port is wanted, and addresses before it");
    bool is_entered = enter_shared(&self->is_shared);
    rdmacm_flow_init(&self->rc.flow_in, self->remote, self->local, self->address_length, (uint16_t)port,
                     RDMACM_ROCE_PORT);
    leave_shared(is_entered);
    Py_RETURN_NONE;
}

/* Read an attribute of 32 bits. False with an exception. */
static bool read_attribute(PyObject *object, const char *name, uint32_t *number) {
    PyObject *value = PyObject_GetAttrString(object, name);
    uint64_t found;
    bool done = value && number_of(value, UINT32_MAX, &found);
    if (value && !done)
        PyErr_Format(PyExc_ValueError, "%s is %R", name, value);
    Py_XDECREF(value);
    *number = done ? (uint32_t)found : 0;
    return done;
}

static PyObject *engine_ready_to_receive(ConnectedEngine *self, PyObject *attributes) {
    struct rdmacm_rtr rtr;
    if (!read_attribute(attributes, "dest_qp_num", &rtr.dest_qp_num) ||
        !read_attribute(attributes, "rq_psn", &rtr.rq_psn) || !read_attribute(attributes, "path_mtu", &rtr.path_mtu) ||
        !read_attribute(attributes, "max_dest_rd_atomic", &rtr.max_dest_rd_atomic) ||
        !read_attribute(attributes, "min_rnr_timer", &rtr.min_rnr_timer) ||
        !read_attribute(attributes, "access", &rtr.access) || !read_attribute(attributes, "pkey", &rtr.pkey))
        return NULL;
    bool is_entered = enter_shared(&self->is_shared);
    bool done = rdmacm_rc_ready_to_receive(&self->rc, &rtr);
    leave_shared(is_entered);
    if (!done)
        return PyErr_Format(PyExc_ValueError, "path_mtu is %u, max_dest_rd_atomic %u", rtr.path_mtu,
                            rtr.max_dest_rd_atomic);
    Py_RETURN_NONE;
}

static bool read_rts(PyObject *attributes, struct rdmacm_rts *rts) {
    uint32_t retry_cnt, rnr_retry;
    PyObject *timeout = PyObject_GetAttrString(attributes, "timeout");
    rts->timeout = timeout ? PyFloat_AsDouble(timeout) : 0;
    Py_XDECREF(timeout);
    if (PyErr_Occurred() || !read_attribute(attributes, "sq_psn", &rts->sq_psn) ||
        !read_attribute(attributes, "retry_cnt", &retry_cnt) || !read_attribute(attributes, "rnr_retry", &rnr_retry) ||
        !read_attribute(attributes, "max_rd_atomic", &rts->max_rd_atomic))
        return false;
    rts->retry_cnt = (int32_t)retry_cnt;
    rts->rnr_retry = (int32_t)rnr_retry;
    return true;
}

static PyObject *engine_ready_to_send(ConnectedEngine *self, PyObject *attributes) {
    struct rdmacm_rts rts;
    if (!self->rc.can_receive)
        return PyErr_Format(PyExc_ValueError, "a queue pair has to be ready to receive before it is ready to send");
    if (!read_rts(attributes, &rts))
        return NULL;
    bool is_entered = enter_shared(&self->is_shared);
    rdmacm_rc_ready_to_send(&self->rc, &rts);
    leave_shared(is_entered);
    Py_RETURN_NONE;
}

static PyObject *engine_set_send_attributes(ConnectedEngine *self, PyObject *args) {
    struct rdmacm_rts rts;
    PyObject *attributes;
    double now;
    if (!PyArg_ParseTuple(args, "Od", &attributes, &now) || !read_rts(attributes, &rts))
        return NULL;
    bool is_entered = enter_shared(&self->is_shared);
    rdmacm_rc_set_send_attributes(&self->rc, &rts, now);
    leave_shared(is_entered);
    Py_RETURN_NONE;
}

static PyObject *engine_set_access(ConnectedEngine *self, PyObject *argument) {
    uint64_t access;
    if (!number_of(argument, UINT32_MAX, &access))
        return PyErr_Format(PyExc_ValueError, "no access flags: %R", argument);
    bool is_entered = enter_shared(&self->is_shared);
    self->rc.access = (uint32_t)access;
    leave_shared(is_entered);
    Py_RETURN_NONE;
}

static PyObject *engine_set_min_rnr_timer(ConnectedEngine *self, PyObject *argument) {
    uint64_t code;
    if (!number_of(argument, 31, &code))
        return PyErr_Format(PyExc_ValueError, "no timer code: %R", argument);
    bool is_entered = enter_shared(&self->is_shared);
    self->rc.min_rnr_timer = (uint32_t)code;
    leave_shared(is_entered);
    Py_RETURN_NONE;
}

static PyObject *engine_set_max_dest_rd_atomic(ConnectedEngine *self, PyObject *argument) {
    uint64_t count;
    bool done = number_of(argument, UINT32_MAX, &count);
    if (done) {
        bool is_entered = enter_shared(&self->is_shared);
        done = rdmacm_rc_set_resources(&self->rc, (uint32_t)count);
        leave_shared(is_entered);
    }
    return done ? Py_NewRef(Py_None) : PyErr_Format(PyExc_ValueError, "max_dest_rd_atomic is %R", argument);
}

static PyObject *engine_pause(ConnectedEngine *self, PyObject *Py_UNUSED(ignored)) {
    bool is_entered = enter_shared(&self->is_shared);
    self->rc.paused = true;
    leave_shared(is_entered);
    Py_RETURN_NONE;
}

static PyObject *engine_resume(ConnectedEngine *self, PyObject *Py_UNUSED(ignored)) {
    bool is_entered = enter_shared(&self->is_shared);
    rdmacm_rc_resume(&self->rc);
    leave_shared(is_entered);
    Py_RETURN_NONE;
}

static PyObject *engine_flush(ConnectedEngine *self, PyObject *Py_UNUSED(ignored)) {
    struct results results;
    bool is_entered = enter_shared(&self->is_shared);
    rdmacm_rc_flush(&self->rc);
    collect(self, &results);
    leave_shared(is_entered);
    return pass_on_none(self, &results);
}

/* -- requests -------------------------------------------------------------------------------------------------------- */

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
static bool read_send(PyObject *work, bool is_xrc, struct rdmacm_send *send) {
    uint8_t kind = rdmacm_request_types[send->opcode].flags, word = rdmacm_request_types[send->opcode].word_kind;
    if (!read_truth(work, names.solicited, &send->solicited) || !read_truth(work, names.fence, &send->fence))
        return false;
    if (word && !read_uint32(work, word == RDMACM_IMMEDIATE ? names.imm : names.invalidate_rkey, UINT32_MAX, &send->word))
        return false;
    if (is_xrc && !read_uint32(work, names.remote_srqn, RDMACM_QPN_MASK, &send->remote_srqn))
        return false;
    if (kind == RDMACM_IS_DATA || kind == RDMACM_IS_LOCAL)
        return true;
    return read_number(work, names.remote_addr, UINT64_MAX, &send->remote_addr) &&
           read_uint32(work, names.rkey, UINT32_MAX, &send->rkey) &&
           (!(kind & RDMACM_IS_ATOMIC) || (read_number(work, names.compare_add, UINT64_MAX, &send->compare_add) &&
                                           read_number(work, names.swap, UINT64_MAX, &send->swap))) &&
           (!(kind & RDMACM_IS_FLUSH) || read_flush(work, send));
}

static PyObject *engine_post_send(ConnectedEngine *self, PyObject *work) {
    struct rdmacm_send send = {0};
    struct results results;
    uint64_t opcode;
    bool is_signaled;
    if (!read_number(work, names.opcode, UINT8_MAX, &opcode) || !rdmacm_rc_has(&self->rc, opcode))
        return PyErr_Occurred() ? NULL : PyErr_Format(PyExc_ValueError, "%R cannot be sent on %s connection", work,
                                                      is_unreliable(self) ? "an unreliable" : "a reliable");
    send.opcode = (uint8_t)opcode;
    if (!self->rc.can_send && !self->rc.failed)
        return PyErr_Format(PyExc_ValueError, "the queue pair is not ready to send");
    uint8_t kind = rdmacm_request_types[opcode].flags;
    struct pin *pin = NULL;
    if (read_send(work, self->rc.transport == RDMACM_XRC, &send) && read_signaled(work, &is_signaled, &send.unsignaled))
        pin = pin_segments(work, kind & (RDMACM_IS_READ | RDMACM_IS_ATOMIC) ? PyBUF_WRITABLE : PyBUF_SIMPLE);
    if (pin && !keep_pin(pin, pin_bind(pin, work, &send)))
        pin = NULL;
    if (!pin)
        return PyErr_Occurred() ? NULL : PyErr_Format(PyExc_ValueError, "a field of it is too large: %R", work);
    pin->unsignaled = !is_signaled;
    send.pin = pin;
    send.memory = pin->memory;
    bool is_entered = enter_shared(&self->is_shared);
    bool done = rdmacm_rc_post_send(&self->rc, &send);
    collect(self, &results);
    leave_shared(is_entered);
    if (!keep_pin(pin, done))
        PyErr_Format(PyExc_ValueError, "no memory for a request, or a message of more than 2^31 bytes");
    return pass_on(self, &results) && done ? Py_NewRef(Py_None) : NULL;
}

static PyObject *engine_post_recv(ConnectedEngine *self, PyObject *work) {
    struct results results;
    struct pin *pin = pin_recv_work(work);
    if (!pin)
        return PyErr_Occurred() ? NULL : PyErr_Format(PyExc_ValueError, "too many elements, or a wrong key: %R", work);
    struct rdmacm_recv recv = {.pin = pin, .memory = pin->memory};
    bool is_entered = enter_shared(&self->is_shared);
    bool done = rdmacm_rc_post_recv(&self->rc, &recv);
    collect(self, &results);
    leave_shared(is_entered);
    if (!keep_pin(pin, done))
        PyErr_NoMemory();
    return pass_on(self, &results) && done ? Py_NewRef(Py_None) : NULL;
}

static PyObject *engine_look_up_again(ConnectedEngine *self, PyObject *args) {
    unsigned int lkey;
    PyObject *look_up;
    if (!PyArg_ParseTuple(args, "IO", &lkey, &look_up))
        return NULL;
    bool is_entered = enter_shared(&self->is_shared);
    rdmacm_rc_look_up_again(&self->rc, lkey);
    leave_shared(is_entered);
    Py_RETURN_NONE;
}

/* -- packets and time ------------------------------------------------------------------------------------------------ */

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

static PyObject *engine_received(ConnectedEngine *self, PyObject *args) {
    Py_buffer data;
    Py_ssize_t segment;
    double now;
    struct results results;
    if (!PyArg_ParseTuple(args, "y*nd", &data, &segment, &now))
        return NULL;
    enter_core(); /* also where no wire uses it: others use memory windows and shared receive queues */
    size_t accepted = rdmacm_rc_take(&self->rc, &self->rc.flow_in, data.buf, (size_t)data.len,
                                     segment > 0 ? (size_t)segment : 0, now);
    collect(self, &results);
    rdmacm_leave();
    PyBuffer_Release(&data);
    return pass_on(self, &results) ? PyLong_FromSize_t(accepted) : NULL;
}

static PyObject *engine_datagrams(ConnectedEngine *self, PyObject *args) {
    double now;
    Py_ssize_t limit, train;
    struct made made[RDMACM_BUILD_LIMIT];
    struct results results;
    if (!PyArg_ParseTuple(args, "dnn", &now, &limit, &train))
        return NULL;
    enter_core(); /* as in engine_received() */
    rdmacm_rc_build(&self->rc, &built, limit > 0 ? (size_t)limit : 0, train > 0 ? (size_t)train : 0, now);
    size_t count = copy_datagrams(NULL, made);
    bool is_complete = count == built.datagrams_count;
    collect(self, &results);
    rdmacm_leave();
    PyObject *list = list_datagrams(made, count, is_complete);
    if (!pass_on(self, &results))
        Py_CLEAR(list);
    return list;
}

static PyObject *engine_probe(ConnectedEngine *self, PyObject *Py_UNUSED(ignored)) {
    bool is_entered = enter_shared(&self->is_shared);
    rdmacm_rc_build_probe(&self->rc, &built);
    bool has_any = built.datagrams_count;
    PyObject *bytes = has_any ? join_pieces(&built.datagrams[0]) : NULL;
    leave_shared(is_entered);
    return has_any ? Py_BuildValue("[N]", bytes) : PyList_New(0);
}

static PyObject *engine_timer(ConnectedEngine *self, PyObject *argument) {
    struct results results;
    double now = PyFloat_AsDouble(argument);
    if (now == -1.0 && PyErr_Occurred())
        return NULL;
    bool is_entered = enter_shared(&self->is_shared);
    rdmacm_rc_timer(&self->rc, now);
    collect(self, &results);
    leave_shared(is_entered);
    return pass_on_none(self, &results);
}

static PyObject *engine_completions(ConnectedEngine *self, PyObject *Py_UNUSED(ignored)) {
    PyObject *found = self->completed;
    self->completed = PyList_New(0);
    return found;
}

static PyObject *engine_take_completed(ConnectedEngine *self, PyObject *Py_UNUSED(ignored)) {
    Py_ssize_t count = PyList_Size(self->srqns);
    PyObject *list = PyList_New(0);
    for (Py_ssize_t i = 0; i < count && i < PyList_Size(self->completed); i++) /* there are fewer after a MemoryError */
        append(&list, PyTuple_Pack(2, PyList_GetItem(self->srqns, i), PyList_GetItem(self->completed, i)));
    if (PyList_SetSlice(self->srqns, 0, count, NULL) < 0 || PyList_SetSlice(self->completed, 0, count, NULL) < 0)
        Py_CLEAR(list);
    return list;
}

/* -- fields ---------------------------------------------------------------------------------------------------------- */

/* Those of RcState and of UcEngine, for tests that compare them. */
#define FIELD(name, kind) {#name, kind, offsetof(ConnectedEngine, rc.name), READONLY, NULL}

static PyMemberDef engine_members[] = {
    {"completed", T_OBJECT, offsetof(ConnectedEngine, completed), READONLY, NULL},
    {"counters", T_OBJECT, offsetof(ConnectedEngine, counters), READONLY, NULL},
    {"failed", T_BOOL, offsetof(ConnectedEngine, rc.failed), 0, NULL},
    FIELD(send_failed, T_BOOL),
    FIELD(qp_num, T_UINT),
    FIELD(srqn, T_INT),
    FIELD(path_mtu, T_UINT),
    FIELD(send_bth, T_ULONGLONG),
    FIELD(identification, T_UINT),
    FIELD(flush_icrc_twice, T_BOOL),
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
    FIELD(ack_psn, T_INT),
    FIELD(ack_aeth, T_UINT),
    {NULL, 0, 0, 0, NULL},
};

static PyObject *get_deadline(ConnectedEngine *self, void *Py_UNUSED(closure)) {
    bool is_entered = enter_shared(&self->is_shared);
    bool has_deadline = self->rc.has_deadline;
    double deadline = self->rc.deadline;
    leave_shared(is_entered);
    return has_deadline ? PyFloat_FromDouble(deadline) : Py_NewRef(Py_None);
}

static PyObject *get_to_send(ConnectedEngine *self, void *Py_UNUSED(closure)) {
    bool is_entered = enter_shared(&self->is_shared);
    int to_send = rdmacm_rc_to_send(&self->rc);
    leave_shared(is_entered);
    return PyLong_FromLong(to_send);
}

static PyObject *get_drained(ConnectedEngine *self, void *Py_UNUSED(closure)) {
    bool is_entered = enter_shared(&self->is_shared);
    bool is_drained = !self->rc.outstanding_count;
    leave_shared(is_entered);
    return PyBool_FromLong(is_drained);
}

static PyObject *get_peer_activity(ConnectedEngine *self, void *Py_UNUSED(closure)) {
    bool is_entered = enter_shared(&self->is_shared);
    uint32_t expected = self->rc.expected_psn, unacked = self->rc.unacked_psn, strays = self->rc.stray_answers;
    leave_shared(is_entered);
    return Py_BuildValue("III", expected, unacked, strays);
}

static PyObject *get_failure(ConnectedEngine *self, void *Py_UNUSED(closure)) {
    bool is_entered = enter_shared(&self->is_shared);
    uint8_t status = self->rc.failure;
    bool is_peers = self->rc.has_failed_peer;
    leave_shared(is_entered);
    if (!status)
        return PyUnicode_FromString("");
    PyObject *member = wc_statuses ? PyTuple_GetItem(wc_statuses, status) : NULL;
    PyObject *name = member ? PyObject_GetAttrString(member, "name") : NULL;
    const char *format = !is_peers ? "%U" : is_unreliable(self) ? "%U of a receive" : "%U of a request of the peer";
    PyObject *text = name ? PyUnicode_FromFormat(format, name) : NULL;
    Py_XDECREF(name);
    return text;
}

static PyGetSetDef engine_getset[] = {
    {"deadline", (getter)get_deadline, NULL, NULL, NULL},
    {"to_send", (getter)get_to_send, NULL, NULL, NULL},
    {"drained", (getter)get_drained, NULL, NULL, NULL},
    {"peer_activity", (getter)get_peer_activity, NULL, NULL, NULL},
    {"failure", (getter)get_failure, NULL, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

#define METHOD(name, flags) {#name, (PyCFunction)engine_##name, flags, NULL}

/* QPEngine (proto/engine.py) describes them. */
static PyMethodDef engine_methods[] = {
    METHOD(set_route, METH_VARARGS),
    METHOD(set_peer_port, METH_O),
    METHOD(ready_to_receive, METH_O),
    METHOD(ready_to_send, METH_O),
    METHOD(set_access, METH_O),
    METHOD(set_min_rnr_timer, METH_O),
    METHOD(set_max_dest_rd_atomic, METH_O),
    METHOD(set_send_attributes, METH_VARARGS),
    METHOD(post_send, METH_O),
    METHOD(post_recv, METH_O),
    METHOD(look_up_again, METH_VARARGS),
    METHOD(pause, METH_NOARGS),
    METHOD(resume, METH_NOARGS),
    METHOD(flush, METH_NOARGS),
    METHOD(timer, METH_O),
    METHOD(received, METH_VARARGS),
    METHOD(probe, METH_NOARGS),
    METHOD(datagrams, METH_VARARGS),
    {"completions", (PyCFunction)engine_completions, METH_NOARGS, "Take the completions since the last call."},
    {"take_completed", (PyCFunction)engine_take_completed, METH_NOARGS,
     "The same of an XRC target, each with the number of its shared receive queue."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot engine_slots[] = {
    SLOT(tp_doc, "ConnectedEngine(qp_num, memory, shared_receives, counters, transport=0, domain=None): a connection\n"
                 "(docs/core.md)."),
    SLOT(tp_new, engine_new),
    SLOT(tp_traverse, engine_traverse),
    SLOT(tp_clear, engine_clear),
    SLOT(tp_dealloc, engine_dealloc),
    SLOT(tp_members, engine_members),
    SLOT(tp_getset, engine_getset),
    SLOT(tp_methods, engine_methods),
    {0, NULL},
};

bool rc_init(PyObject *module) {
    connected_type = ADD_TYPE(module, ConnectedEngine, Py_TPFLAGS_HAVE_GC, engine_slots);
    return connected_type != NULL;
}
