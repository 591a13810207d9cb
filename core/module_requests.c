/* Glue: work requests that are posted directly, as the user has made them.
 *
 * A request that the core does not take is left to Python, which also finds out what is wrong with it.
 */
#include "module.h"

static PyObject *send_wr_class, *recv_wr_class, *sge_class, *mr_class;

/* -- parsing --------------------------------------------------------------------------------------------------------- */

bool number_of(PyObject *value, uint64_t most, uint64_t *number) {
    if (!PyLong_Check(value))
        return false;
    *number = PyLong_AsUnsignedLongLong(value);
    return *number <= most && !(*number == UINT64_MAX && PyErr_Occurred());
}

bool read_number(PyObject *object, PyObject *name, uint64_t most, uint64_t *number) {
    PyObject *value = PyObject_GetAttr(object, name);
    bool is_right = value && number_of(value, most, number);
    Py_XDECREF(value);
    return is_right;
}

bool read_uint32(PyObject *object, PyObject *name, uint32_t most, uint32_t *number) {
    uint64_t found = 0;
    bool is_right = read_number(object, name, most, &found);
    *number = (uint32_t)found;
    return is_right;
}

bool read_truth(PyObject *object, PyObject *name, bool *truth) {
    PyObject *value = PyObject_GetAttr(object, name);
    int found = value ? PyObject_IsTrue(value) : -1;
    Py_XDECREF(value);
    *truth = found > 0;
    return found >= 0;
}

/* The one element of `sg`: 1, a new reference; 0: it is empty; -1: neither. */
static int get_element(PyObject *request, PyObject **element) {
    PyObject *sg = PyObject_GetAttr(request, names.sg);
    int count = -1;
    *element = NULL;
    if (sg && PyList_CheckExact(sg)) {
        Py_ssize_t size = PyList_Size(sg);
        count = size > 1 ? -1 : (int)size;
        if (count == 1)
            *element = Py_XNewRef(PyList_GetItem(sg, 0));
    } else if (sg && PyTuple_CheckExact(sg)) {
        Py_ssize_t size = PyTuple_Size(sg);
        count = size > 1 ? -1 : (int)size;
        if (count == 1)
            *element = Py_XNewRef(PyTuple_GetItem(sg, 0));
    }
    Py_XDECREF(sg);
    return count == 1 && !*element ? -1 : count;
}

static bool local_of_sge(PyObject *sge, struct local *local) {
    return read_number(sge, names.length, RDMACM_LONGEST_MESSAGE, &local->length) &&
           read_number(sge, names.addr, UINT64_MAX, &local->address) &&
           read_number(sge, names.lkey, UINT32_MAX, &local->lkey);
}

bool local_of_region(PyObject *region, PyObject *offset, PyObject *length, struct local *local) {
    uint64_t start, whole;
    if ((PyObject *)Py_TYPE(region) != mr_class)
        return false;
    PyObject *closed = PyObject_GetAttr(region, names._closed);
    Py_XDECREF(closed);
    if (closed != Py_False || !number_of(offset, RDMACM_LONGEST_MESSAGE, &start) ||
        !read_number(region, names.length, UINT64_MAX, &whole) ||
        !read_number(region, names.addr, UINT64_MAX, &local->address) ||
        !read_number(region, names.lkey, UINT32_MAX, &local->lkey) || start > whole)
        return false;
    local->length = whole - start;
    local->address += start;
    return length == Py_None || number_of(length, local->length, &local->length);
}

/* Its element and its number. */
static bool parse(PyObject *object, struct request *request, bool may_be_bytes) {
    int count = get_element(object, &request->element);
    request->has_element = count > 0;
    if (count > 0 && (PyObject *)Py_TYPE(request->element) == sge_class) {
        if (!local_of_sge(request->element, &request->local))
            return false;
    } else if (count > 0 && may_be_bytes && PyBytes_CheckExact(request->element)) {
        request->local.bytes = request->element;
    } else if (count) {
        return false;
    }
    request->wr_id = PyObject_GetAttr(object, names.wr_id);
    return request->wr_id && PyLong_CheckExact(request->wr_id);
}

bool parse_send(PyObject *object, struct request *request) {
    *request = (struct request){0};
    return (PyObject *)Py_TYPE(object) == send_wr_class &&
           read_number(object, names.opcode, UINT32_MAX, &request->opcode) &&
           read_number(object, names.send_flags, UINT32_MAX, &request->flags) && parse(object, request, true);
}

bool parse_recv(PyObject *object, struct request *request) {
    *request = (struct request){0};
    return (PyObject *)Py_TYPE(object) == recv_wr_class && parse(object, request, false);
}

void end_request(struct request *request) {
    Py_XDECREF(request->wr_id);
    Py_XDECREF(request->element);
}

bool parse_flags(const struct rules *rules, uint64_t flags, bool has_element, bool *solicited, bool *unsignaled) {
    *solicited = flags & RDMACM_FLAG_SOLICITED;
    *unsignaled = !(flags & RDMACM_FLAG_SIGNALED || rules->signals_all);
    return !(flags & ~(uint64_t)(RDMACM_FLAG_SIGNALED | RDMACM_FLAG_SOLICITED | RDMACM_FLAG_INLINE)) &&
           (!has_element || rules->has_send_sge);
}

/* -- memory ---------------------------------------------------------------------------------------------------------- */

/* Find the bytes; false where key, range or permission is wrong. */
static bool find_memory(const struct rules *rules, const struct local *local, uint32_t access, uint8_t **data,
                        struct pin **region) {
    *data = NULL;
    *region = NULL;
    if (!local->length)
        return true;
    if (local->length > RDMACM_LONGEST_MESSAGE)
        return false;
    void *pin = NULL;
    *data = rdmacm_regions_find(rules->regions, rules->pd, (uint32_t)local->lkey, local->address, local->length,
                                access, &pin);
    *region = pin;
    return *data != NULL;
}

/* The pin of a request for part of a region, for bytes, or for nothing. NULL without memory. */
static struct pin *pin_request(PyObject *wr_id, struct pin *region, PyObject *bytes) {
    struct pin *pin = make_pin(NULL, bytes, PyBUF_SIMPLE);
    if (!pin)
        return NULL;
    pin->wr_id = Py_NewRef(wr_id);
    pin->region = region;
    if (region)
        region->uses++;
    return pin;
}

struct pin *pin_data(const struct rules *rules, PyObject *wr_id, const struct local *local, uint64_t flags,
                       bool is_written, uint8_t **data, uint32_t *length) {
    struct pin *region = NULL;
    PyObject *bytes = NULL;
    *data = NULL;
    *length = 0;
    if (local && local->bytes) {
        if (!(flags & RDMACM_FLAG_INLINE) || (size_t)PyBytes_Size(local->bytes) > rules->max_inline)
            return NULL;
        bytes = Py_NewRef(local->bytes);
    } else if (local) {
        if (!find_memory(rules, local, is_written ? RDMACM_ACCESS_LOCAL_WRITE : 0, data, &region))
            return NULL;
        *length = (uint32_t)local->length;
        if (flags & RDMACM_FLAG_INLINE) {
            if (local->length > rules->max_inline)
                return NULL;
            bytes = PyBytes_FromStringAndSize((const char *)*data, (Py_ssize_t)local->length);
            if (!bytes)
                return NULL;
            region = NULL;
        }
    }
    struct pin *pin = pin_request(wr_id, region, bytes);
    Py_XDECREF(bytes);
    if (pin && pin->has_view) {
        *data = pin->view.buf;
        *length = (uint32_t)pin->view.len;
    }
    return pin;
}

struct pin *pin_receive(const struct rules *rules, PyObject *wr_id, const struct local *local,
                          struct rdmacm_recv *recv) {
    struct pin *region = NULL;
    if (local && (!rules->has_recv_sge || !find_memory(rules, local, RDMACM_ACCESS_LOCAL_WRITE, &recv->data, &region)))
        return NULL;
    recv->length = local ? local->length : 0;
    recv->lkey = region ? (uint32_t)local->lkey : 0;
    recv->pin = pin_request(wr_id, region, NULL);
    return recv->pin;
}

/* -- lists ----------------------------------------------------------------------------------------------------------- */

Py_ssize_t post_all(QueuePair *self, PyObject *requests, bool (*post)(QueuePair *, PyObject *)) {
    if (!PyList_CheckExact(requests))
        return post(self, requests);
    Py_ssize_t done = 0;
    for (; done < PyList_Size(requests); done++) {
        PyObject *request = Py_XNewRef(PyList_GetItem(requests, done));
        bool is_posted = request && post(self, request);
        Py_XDECREF(request);
        if (!is_posted)
            break;
    }
    return done;
}

PyObject *rest_of(PyObject *requests, Py_ssize_t done) {
    if (!done)
        return Py_NewRef(requests);
    if (!PyList_CheckExact(requests) || done >= PyList_Size(requests))
        Py_RETURN_NONE;
    return PyList_GetSlice(requests, done, PyList_Size(requests));
}

PyObject *configure_requests(PyObject *Py_UNUSED(module), PyObject *args) {
    return set_objects(args, 4, &send_wr_class, &recv_wr_class, &sge_class, &mr_class);
}
