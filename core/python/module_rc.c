/* Glue: the engine of a connection. What module_memory.c says about locks and memory is true here. */
#include "module.h"

#include <string.h>

PyTypeObject *connected_type;

/* -- the object ------------------------------------------------------------------------------------------------------ */

/* Be the target of an XRC connection; with None nothing is done. */
static bool set_domain(Engine *self, PyObject *domain) {
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

static bool is_unreliable(const Engine *self) { return self->rc.transport == RDMACM_UC; }

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
    Engine *self = new_object(type);
    if (!self)
        return NULL;
    rdmacm_rc_init(&self->rc, transport, qp_num, NULL);
    return finish_object(self, engine_set(self, memory, shared, counters) && set_domain(self, domain) &&
                                   read_number(memory, names.number, UINT64_MAX, &self->rc.qp));
}

/* -- the path and the states ----------------------------------------------------------------------------------------- */

static PyObject *engine_set_route(Engine *self, PyObject *args) {
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
    ENGINE_DO(self, rdmacm_flow_init(&self->rc.flow_out, self->local, self->remote, self->address_length,
                                     (uint16_t)port, RDMACM_ROCE_PORT));
    Py_RETURN_NONE;
}

static PyObject *engine_set_peer_port(Engine *self, PyObject *argument) {
    uint64_t port;
    if (!number_of(argument, UINT16_MAX, &port) || !self->address_length)
        return PyErr_Format(PyExc_ValueError, "a port is wanted, and addresses before it");
    ENGINE_DO(self, rdmacm_flow_init(&self->rc.flow_in, self->remote, self->local, self->address_length,
                                     (uint16_t)port, RDMACM_ROCE_PORT));
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

static PyObject *engine_ready_to_receive(Engine *self, PyObject *attributes) {
    struct rdmacm_rtr rtr;
    if (!read_attribute(attributes, "dest_qp_num", &rtr.dest_qp_num) ||
        !read_attribute(attributes, "rq_psn", &rtr.rq_psn) || !read_attribute(attributes, "path_mtu", &rtr.path_mtu) ||
        !read_attribute(attributes, "max_dest_rd_atomic", &rtr.max_dest_rd_atomic) ||
        !read_attribute(attributes, "min_rnr_timer", &rtr.min_rnr_timer) ||
        !read_attribute(attributes, "access", &rtr.access) || !read_attribute(attributes, "pkey", &rtr.pkey))
        return NULL;
    bool done;
    ENGINE_DO(self, done = rdmacm_rc_ready_to_receive(&self->rc, &rtr));
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

static PyObject *engine_ready_to_send(Engine *self, PyObject *attributes) {
    struct rdmacm_rts rts;
    if (!self->rc.can_receive)
        return PyErr_Format(PyExc_ValueError, "a queue pair has to be ready to receive before it is ready to send");
    if (!read_rts(attributes, &rts))
        return NULL;
    ENGINE_DO(self, rdmacm_rc_ready_to_send(&self->rc, &rts));
    Py_RETURN_NONE;
}

static PyObject *engine_set_send_attributes(Engine *self, PyObject *args) {
    struct rdmacm_rts rts;
    PyObject *attributes;
    double now;
    if (!PyArg_ParseTuple(args, "Od", &attributes, &now) || !read_rts(attributes, &rts))
        return NULL;
    ENGINE_DO(self, rdmacm_rc_set_send_attributes(&self->rc, &rts, now));
    Py_RETURN_NONE;
}

static PyObject *engine_set_access(Engine *self, PyObject *argument) {
    uint64_t access;
    if (!number_of(argument, UINT32_MAX, &access))
        return PyErr_Format(PyExc_ValueError, "no access flags: %R", argument);
    ENGINE_DO(self, self->rc.access = (uint32_t)access);
    Py_RETURN_NONE;
}

static PyObject *engine_set_min_rnr_timer(Engine *self, PyObject *argument) {
    uint64_t code;
    if (!number_of(argument, 31, &code))
        return PyErr_Format(PyExc_ValueError, "no timer code: %R", argument);
    ENGINE_DO(self, self->rc.min_rnr_timer = (uint32_t)code);
    Py_RETURN_NONE;
}

static PyObject *engine_set_max_dest_rd_atomic(Engine *self, PyObject *argument) {
    uint64_t count;
    bool done = number_of(argument, UINT32_MAX, &count);
    if (done)
        ENGINE_DO(self, done = rdmacm_rc_set_resources(&self->rc, (uint32_t)count));
    return done ? Py_NewRef(Py_None) : PyErr_Format(PyExc_ValueError, "max_dest_rd_atomic is %R", argument);
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
    return read_truth(work, names.solicited, &send->solicited) && read_truth(work, names.fence, &send->fence) &&
           read_fields(work, names.imm, is_xrc, send) &&
           (!(rdmacm_request_types[send->opcode].flags & RDMACM_IS_FLUSH) || read_flush(work, send));
}

static PyObject *engine_post_send(Engine *self, PyObject *work) {
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
    bool done;
    ENGINE_DO(self, done = rdmacm_post_send(&self->queues, &send); collect(self, &results));
    if (!keep_pin(pin, done))
        PyErr_Format(PyExc_ValueError, "no memory for a request, or a message of more than 2^31 bytes");
    return pass_on_posted(self, &results, done);
}

/* -- packets and time ------------------------------------------------------------------------------------------------ */

static PyObject *engine_received(Engine *self, PyObject *args) {
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

static PyObject *engine_datagrams(Engine *self, PyObject *args) {
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
    return pass_on_list(self, &results, list_datagrams(made, count, is_complete));
}

static PyObject *engine_probe(Engine *self, PyObject *Py_UNUSED(ignored)) {
    PyObject *bytes;
    ENGINE_DO(self, rdmacm_rc_build_probe(&self->rc, &built); bytes = built.datagrams_count ? copy_datagram() : NULL);
    return bytes ? Py_BuildValue("[N]", bytes) : PyErr_Occurred() ? NULL : PyList_New(0);
}

static PyObject *engine_timer(Engine *self, PyObject *argument) {
    struct results results;
    double now = PyFloat_AsDouble(argument);
    if (now == -1.0 && PyErr_Occurred())
        return NULL;
    ENGINE_DO(self, rdmacm_rc_timer(&self->rc, now); collect(self, &results));
    return pass_on_none(self, &results);
}

static PyObject *engine_completions(Engine *self, PyObject *Py_UNUSED(ignored)) {
    PyObject *found = self->completed;
    self->completed = PyList_New(0);
    return found;
}

static PyObject *engine_take_completed(Engine *self, PyObject *Py_UNUSED(ignored)) {
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
#define RC_FIELD(name, kind) FIELD(name, rc, kind, READONLY)

static PyMemberDef engine_members[] = {
    ENGINE_FIELDS,
    RC_FIELD(srqn, T_INT), RC_FIELD(path_mtu, T_UINT), RC_FIELD(send_bth, T_ULONGLONG),
    RC_FIELD(identification, T_UINT), RC_FIELD(flush_icrc_twice, T_BOOL), RC_FIELD(can_send, T_BOOL),
    RC_FIELD(can_receive, T_BOOL), RC_FIELD(paused, T_BOOL), RC_FIELD(rnr_waiting, T_BOOL),
    RC_FIELD(retransmitting, T_BOOL), RC_FIELD(next_psn, T_UINT), RC_FIELD(end_psn, T_UINT),
    RC_FIELD(unacked_psn, T_UINT), RC_FIELD(window, T_UINT), RC_FIELD(loss_window, T_UINT),
    RC_FIELD(ack_interval, T_UINT), RC_FIELD(outstanding_reads, T_UINT), RC_FIELD(max_rd_atomic, T_UINT),
    RC_FIELD(retry_cnt, T_INT), RC_FIELD(rnr_retry, T_INT), RC_FIELD(retries_left, T_INT),
    RC_FIELD(rnr_retries_left, T_INT), RC_FIELD(stray_answers, T_UINT), RC_FIELD(timeout, T_DOUBLE),
    RC_FIELD(access, T_UINT), RC_FIELD(expected_psn, T_UINT), RC_FIELD(executed_psn, T_UINT), RC_FIELD(msn, T_UINT),
    RC_FIELD(max_dest_rd_atomic, T_UINT), RC_FIELD(min_rnr_timer, T_UINT), RC_FIELD(nak_sent, T_BOOL),
    RC_FIELD(operation, T_INT), RC_FIELD(ack_psn, T_INT), RC_FIELD(ack_aeth, T_UINT),
    {NULL, 0, 0, 0, NULL},
};

static PyObject *get_deadline(Engine *self, void *Py_UNUSED(closure)) {
    bool has_deadline;
    double deadline;
    ENGINE_DO(self, has_deadline = self->rc.has_deadline, deadline = self->rc.deadline);
    return has_deadline ? PyFloat_FromDouble(deadline) : Py_NewRef(Py_None);
}

ENGINE_GETTER(get_to_send, int, rdmacm_rc_to_send(&self->rc), PyLong_FromLong)
ENGINE_GETTER(get_sent_again, long, self->rc.retry_cnt - self->rc.retries_left, PyLong_FromLong)
ENGINE_GETTER(get_drained, bool, !self->rc.outstanding_count, PyBool_FromLong)

static PyObject *get_peer_activity(Engine *self, void *Py_UNUSED(closure)) {
    uint32_t expected, unacked, strays;
    ENGINE_DO(self, expected = self->rc.expected_psn, unacked = self->rc.unacked_psn, strays = self->rc.stray_answers);
    return Py_BuildValue("III", expected, unacked, strays);
}

static PyObject *get_failure(Engine *self, void *Py_UNUSED(closure)) {
    uint8_t status;
    bool is_peers;
    ENGINE_DO(self, status = self->rc.failure, is_peers = self->rc.has_failed_peer);
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
    {"sent_again", (getter)get_sent_again, NULL, NULL, NULL},
    {"failure", (getter)get_failure, NULL, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

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
    ENGINE_METHODS,
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
    ENGINE_SLOTS,
    {0, NULL},
};

bool rc_init(PyObject *module) {
    connected_type = add_type(module, MODULE_NAME ".ConnectedEngine", sizeof(Engine), Py_TPFLAGS_HAVE_GC, engine_slots);
    return connected_type != NULL;
}
