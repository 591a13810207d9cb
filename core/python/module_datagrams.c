/* Glue: datagram queue pairs of a wire, and requests that are posted to them directly. */
#include "module.h"

#include <string.h>

typedef struct {
    QueuePair base;
    struct rdmacm_ud_end end;
} Datagrams;

PyObject *ah_class;

/* -- requests -------------------------------------------------------------------------------------------------------- */

/* Whether an attribute is an object. */
static bool has(PyObject *object, PyObject *name, const PyObject *wanted) {
    PyObject *value = PyObject_GetAttr(object, name);
    Py_XDECREF(value);
    return value == wanted;
}

/* The route of a request's address handle: a new reference, NULL if the core does not know the handle. */
static Route *route_of(const Datagrams *self, PyObject *request) {
    PyObject *ah = PyObject_GetAttr(request, names.ah), *route = NULL;
    if (ah && (PyObject *)Py_TYPE(ah) == ah_class && has(ah, names._closed, Py_False) &&
        has(ah, names.pd, self->base.pd))
        route = PyObject_GetAttr(ah, names.core_route);
    Py_XDECREF(ah);
    if (route && Py_TYPE(route) == route_type) {
        Route *found = (Route *)route;
        if (found->wire == (PyObject *)self->base.wire && self->end.fds[found->route.is_ipv6] >= 0)
            return found;
    }
    Py_XDECREF(route);
    return NULL;
}

/* The fixed fields of a request. False if it is not one of those that the core takes. */
static bool begin_send(const struct rules *rules, const struct request *request, struct rdmacm_ud_send *send) {
    send->has_imm = request->opcode == RDMACM_WR_SEND_WITH_IMM;
    return rdmacm_ud_has(request->opcode) &&
           parse_flags(rules, request->flags, request->count, &send->solicited, &send->unsignaled);
}

/* Queue a SendWR. */
static bool post_send(void *queue_pair, PyObject *object) {
    QueuePair *self = queue_pair;
    struct request request;
    struct rdmacm_ud_send send = {0};
    struct pin *pin = NULL;
    bool done = parse_send(object, &request) && begin_send(&self->rules, &request, &send) &&
                read_uint32(object, names.remote_qpn, RDMACM_QPN_MASK, &send.dest_qpn) &&
                read_uint32(object, names.remote_qkey, UINT32_MAX, &send.qkey) &&
                (!send.has_imm || read_uint32(object, names.imm_data, UINT32_MAX, &send.imm));
    Route *route = done ? route_of((Datagrams *)self, object) : NULL;
    if (route)
        pin = pin_data(&self->rules, request.wr_id, request.locals, request.count, request.flags, false);
    end_request(&request);
    if (!pin) {
        Py_XDECREF((PyObject *)route);
        return false;
    }
    pin->unsignaled = send.unsignaled;
    pin->route = (PyObject *)route;
    send.pin = pin;
    send.memory = pin->memory;
    send.route = &route->route;
    send.flow = route->flow;
    enter_core();
    done = rdmacm_ud_post_send(self->conn->ud->ud, &send);
    rdmacm_leave();
    return keep_pin(pin, done);
}

/* A send without an address handle, which Python refuses. */
static PyObject *datagrams_post_part(PyObject *Py_UNUSED(self), PyObject *const *Py_UNUSED(args),
                                     Py_ssize_t Py_UNUSED(count)) {
    Py_RETURN_FALSE;
}

static PyObject *datagrams_add_address(Datagrams *self, PyObject *args) {
    const char *address;
    Py_ssize_t length;
    struct rdmacm_ud_end *end = &self->end;
    struct rdmacm_own_address own = {0};
    if (!PyArg_ParseTuple(args, "y#I", &address, &length, &own.scope))
        return NULL;
    if (length != 4 && length != 16)
        return PyErr_Format(PyExc_ValueError, "an address has 4 or 16 bytes, not %zd", length);
    own.is_ipv6 = length == 16;
    memcpy(own.address, address, (size_t)length);
    enter_core();
    size_t at = 0;
    while (at < end->own_count && (end->own[at].is_ipv6 != own.is_ipv6 || end->own[at].scope != own.scope ||
                                   memcmp(end->own[at].address, own.address, sizeof own.address) != 0))
        at++;
    if (at == end->own_count && at < RDMACM_OWN_ADDRESSES)
        end->own[end->own_count++] = own;
    rdmacm_leave();
    Py_RETURN_NONE;
}

/* -- the object ------------------------------------------------------------------------------------------------------ */

static PyObject *datagrams_new(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(keywords)) {
    struct queue_pair_parts parts;
    PyObject *pd, *regions;
    int fds[2];
    if (!PyArg_ParseTuple(args, "O!O!OOO!O!O!(ii)O!", wire_type, &parts.wire, ud_core_type, &parts.core, &parts.qp, &pd,
                          regions_type, &regions, queue_type, &parts.send_queue, queue_type, &parts.recv_queue, &fds[0],
                          &fds[1], &PyTuple_Type, &parts.limits))
        return NULL;
    UdCore *core = (UdCore *)parts.core;
    if (!((Wire *)parts.wire)->wire || core->is_shared || core->ud.sends_count)
        return PyErr_Format(PyExc_ValueError, "a closed wire, or an engine that is on a wire or has to send");
    Datagrams *self = new_object(type);
    if (!self)
        return NULL;
    struct rdmacm_ud_end *end = &self->end;
    end->ud = &core->ud;
    memcpy(end->fds, fds, sizeof fds);
    end->conn.ud = end;
    end->conn.qp_num = end->ud->qp_num;
    self->base.conn = &end->conn;
    self->base.post_send = post_send;
    self->base.is_shared = &core->is_shared;
    self->base.rules.regions = &((Regions *)regions)->regions;
    self->base.rules.pd = (uint64_t)(uintptr_t)pd;
    self->base.pd = Py_NewRef(pd);
    self->base.regions = Py_NewRef(regions);
    if (!queue_pair_join(&self->base, &parts)) {
        Py_DECREF((PyObject *)self);
        return NULL;
    }
    return (PyObject *)self;
}

static PyMethodDef datagrams_methods[] = {
    QUEUE_PAIR_METHODS,
    {"post_part", (PyCFunction)(void (*)(void))datagrams_post_part, METH_FASTCALL,
     "False: a datagram needs an address handle."},
    {"add_address", (PyCFunction)datagrams_add_address, METH_VARARGS,
     "add_address(address, scope): accept packets that were sent to an address of the device."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot datagrams_slots[] = {
    SLOT(tp_doc, "A datagram queue pair of a wire (docs/core.md)."),
    SLOT(tp_new, datagrams_new),
    QUEUE_PAIR_SLOTS,
    SLOT(tp_methods, datagrams_methods),
    {0, NULL},
};

bool datagrams_init(PyObject *module) {
    return ADD_TYPE(module, Datagrams, Py_TPFLAGS_HAVE_GC, datagrams_slots) != NULL;
}
