/* Glue: datagram queue pairs of a wire, and requests that are posted to them directly. */
#include "module.h"

#include <stdlib.h>
#include <string.h>

typedef struct {
    QueuePair base;
    struct rdmacm_ud_end end;
} Datagrams;

typedef struct {
    PyObject_HEAD
    struct rdmacm_addresses addresses;
} Addresses;

static PyTypeObject *addresses_type;
/* That of address handles. */
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
        has(ah, names.pd, self->base.core->pd))
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
static bool begin_send(const struct rules *rules, const struct request *request, struct rdmacm_send *send) {
    send->opcode = (uint8_t)request->opcode;
    return rdmacm_ud_has(request->opcode) &&
           parse_flags(rules, request->flags, request->count, &send->solicited, &send->unsignaled);
}

/* Queue a SendWR. */
static bool post_send(void *queue_pair, PyObject *object) {
    QueuePair *self = queue_pair;
    struct request request;
    struct rdmacm_send send = {0};
    struct pin *pin = NULL;
    bool done = parse_send(object, &request) && begin_send(&self->rules, &request, &send) &&
                read_uint32(object, names.remote_qpn, RDMACM_QPN_MASK, &send.dest_qpn) &&
                read_uint32(object, names.remote_qkey, UINT32_MAX, &send.qkey) &&
                (send.opcode == RDMACM_WR_SEND || read_uint32(object, names.imm_data, UINT32_MAX, &send.word));
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
    struct rdmacm_ud *ud = self->conn->ud->ud;
    CORE_DO(done = ud->is_ready && send.memory.length <= ud->max_payload && rdmacm_ud_post_send(ud, &send));
    return keep_pin(pin, done);
}

/* A send without an address handle, which Python refuses. */
static PyObject *datagrams_post_part(PyObject *Py_UNUSED(self), PyObject *const *Py_UNUSED(args),
                                     Py_ssize_t Py_UNUSED(count)) {
    Py_RETURN_FALSE;
}

static PyObject *datagrams_transmit(Datagrams *self, PyObject *argument) {
    Py_ssize_t limit = PyLong_AsSsize_t(argument);
    struct seen seen = {0};
    if (limit == -1 && PyErr_Occurred())
        return NULL;
    PyThreadState *state = begin_core();
    const struct rdmacm_wire *wire = self->end.conn.wire;
    bool done = wire && wire->is_enabled;
    size_t sent = done ? rdmacm_ud_transmit(&self->end, limit > 0 ? (size_t)limit : 0) : 0;
    look_events(self->base.wire, &seen);
    end_core(state);
    if (!see_events(self->base.wire, &seen))
        return NULL;
    return done ? PyLong_FromSize_t(sent) : Py_NewRef(Py_None);
}

/* -- addresses ------------------------------------------------------------------------------------------------------- */

static PyObject *addresses_new(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(keywords)) {
    unsigned int ifindex;
    if (!PyArg_ParseTuple(args, "I", &ifindex))
        return NULL;
    Addresses *self = new_object(type);
    if (self)
        self->addresses.ifindex = ifindex;
    return (PyObject *)self;
}

static void addresses_dealloc(Addresses *self) {
    free(self->addresses.items);
    free_object((PyObject *)self);
}

/* False with an exception. */
static bool read_address(PyObject *object, struct rdmacm_address *address) {
    Py_ssize_t length = object && PyBytes_Check(object) ? PyBytes_Size(object) : 0;
    if (length != 4 && length != 16) {
        PyErr_SetString(PyExc_ValueError, "an address has 4 or 16 bytes");
        return false;
    }
    *address = (struct rdmacm_address){.is_ipv6 = length == 16};
    memcpy(address->address, PyBytes_AsString(object), (size_t)length);
    return true;
}

static PyObject *addresses_set(Addresses *self, PyObject *list) {
    Py_ssize_t count = PyList_Check(list) ? PyList_Size(list) : -1;
    if (count < 0)
        return PyErr_Format(PyExc_TypeError, "a list of addresses is wanted");
    struct rdmacm_address *items = malloc((size_t)(count ? count : 1) * sizeof *items);
    if (!items)
        return PyErr_NoMemory();
    Py_ssize_t done = 0;
    while (done < count && read_address(PyList_GetItem(list, done), &items[done]))
        done++;
    if (done == count) {
        enter_core();
        struct rdmacm_address *before = self->addresses.items;
        self->addresses.items = items;
        self->addresses.count = (size_t)count;
        rdmacm_leave();
        items = before;
    }
    free(items);
    return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
}

static PyMethodDef addresses_methods[] = {
    {"set", (PyCFunction)addresses_set, METH_O, "set(addresses): a list of packed addresses."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot addresses_slots[] = {
    SLOT(tp_doc, "Addresses(ifindex): those of a device, whose datagram queue pairs accept packets at them."),
    SLOT(tp_new, addresses_new),
    SLOT(tp_dealloc, addresses_dealloc),
    SLOT(tp_methods, addresses_methods),
    {0, NULL},
};

/* -- the object ------------------------------------------------------------------------------------------------------ */

/* Whether a wire knows how to send everything that is posted. */
static bool has_routes(const struct rdmacm_ud *ud) {
    for (size_t i = 0; i < ud->sends_count; i++) {
        const struct pin *pin = RDMACM_RING_AT(ud, sends, i)->pin;
        if (Py_TYPE(pin->route) != route_type)
            return false;
    }
    return true;
}

static PyObject *datagrams_new(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(keywords)) {
    struct queue_pair_parts parts;
    PyObject *addresses;
    int fds[2];
    if (!PyArg_ParseTuple(args, "O!O!OO!O!O!(ii)O!", wire_type, &parts.wire, ud_engine_type, &parts.core, &parts.qp,
                          queue_type, &parts.send_queue, queue_type, &parts.recv_queue, addresses_type, &addresses,
                          &fds[0], &fds[1], &PyTuple_Type, &parts.limits))
        return NULL;
    Engine *engine = parts.core;
    if (!parts.wire->wire || engine->is_shared || !has_routes(&engine->ud))
        return PyErr_Format(PyExc_ValueError, "a closed wire, or an engine that is on a wire or has other routes");
    Datagrams *self = new_object(type);
    if (!self)
        return NULL;
    struct rdmacm_ud_end *end = &self->end;
    end->ud = &engine->ud;
    end->addresses = &((Addresses *)addresses)->addresses;
    memcpy(end->fds, fds, sizeof fds);
    end->conn.ud = end;
    self->base.conn = &end->conn;
    self->base.post_send = post_send;
    self->base.addresses = Py_NewRef(addresses);
    return finish_object(self, queue_pair_join(&self->base, &parts));
}

static PyMethodDef datagrams_methods[] = {
    QUEUE_PAIR_METHODS,
    {"post_part", (PyCFunction)(void (*)(void))datagrams_post_part, METH_FASTCALL,
     "False: a datagram needs an address handle."},
    {"transmit", (PyCFunction)datagrams_transmit, METH_O,
     "transmit(limit): send up to `limit` packets, and return how many; None if Python has to do it."},
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
    addresses_type = ADD_TYPE(module, Addresses, 0, addresses_slots);
    return addresses_type && ADD_TYPE(module, Datagrams, Py_TPFLAGS_HAVE_GC, datagrams_slots) != NULL;
}
