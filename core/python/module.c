/* The glue between the core and Python: the module rdmacm.proto._core, with the limited API of Python 3.11.
 *
 * This file has its functions; the other files module_*.c have its types.
 */
#include "module.h"

struct names names;

static bool intern_names(void) {
#define AND_INTERN(name) && (names.name = PyUnicode_InternFromString(#name))
    return true FOR_NAMES(AND_INTERN);
}

/* -- objects --------------------------------------------------------------------------------------------------------- */

PyTypeObject *add_type(PyObject *module, const char *name, size_t size, unsigned long flags, PyType_Slot *slots) {
    PyType_Spec spec = {
        .name = name,
        .basicsize = (int)size,
        .flags = (unsigned)(Py_TPFLAGS_DEFAULT | flags),
        .slots = slots,
    };
    PyTypeObject *type = (PyTypeObject *)PyType_FromSpec(&spec);
    if (type && PyModule_AddType(module, type) < 0)
        Py_CLEAR(type);
    return type;
}

void *new_object(PyTypeObject *type) {
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    return allocate(type, 0);
}

void set_object(PyObject **place, PyObject *object) {
    PyObject *before = *place;
    *place = Py_NewRef(object);
    Py_XDECREF(before);
}

PyObject *set_objects(PyObject *args, Py_ssize_t count, ...) {
    if (PyTuple_Size(args) != count)
        return PyErr_Format(PyExc_TypeError, "%zd arguments are wanted", count);
    va_list places;
    va_start(places, count);
    for (Py_ssize_t i = 0; i < count; i++)
        set_object(va_arg(places, PyObject **), PyTuple_GetItem(args, i));
    va_end(places);
    Py_RETURN_NONE;
}

descrgetfunc get_slot;
descrsetfunc set_slot;

bool find_slots(PyObject *class, const char *const *fields, size_t count, PyObject **slots) {
    get_slot = (descrgetfunc)PyType_GetSlot(&PyMemberDescr_Type, Py_tp_descr_get);
    set_slot = (descrsetfunc)PyType_GetSlot(&PyMemberDescr_Type, Py_tp_descr_set);
    for (size_t i = 0; i < count; i++) {
        PyObject *slot = PyObject_GetAttrString(class, fields[i]);
        bool is_slot = slot && Py_IS_TYPE(slot, &PyMemberDescr_Type);
        if (is_slot)
            set_object(&slots[i], slot);
        else if (slot)
            PyErr_Format(PyExc_TypeError, "%R has no slot for %s", class, fields[i]);
        Py_XDECREF(slot);
        if (!is_slot)
            return false;
    }
    return true;
}

void free_object(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    freefunc free_self = (freefunc)PyType_GetSlot(type, Py_tp_free);
    free_self(self);
    Py_DECREF(type);
}

PyObject *finish_object(void *self, bool is_complete) {
    if (!is_complete)
        Py_CLEAR(self);
    return self;
}

void append(PyObject **list, PyObject *item) {
    if (*list && (!item || PyList_Append(*list, item) < 0))
        Py_CLEAR(*list);
    Py_XDECREF(item);
}

PyObject *answer(bool is_done) { return PyErr_Occurred() ? NULL : PyBool_FromLong(is_done); }

/* -- functions ------------------------------------------------------------------------------------------------------- */

static PyObject *crc32_by(uint32_t (*method)(uint32_t, const void *, size_t), PyObject *args) {
    Py_buffer data;
    unsigned int crc = 0;
    if (!PyArg_ParseTuple(args, "y*|I", &data, &crc))
        return NULL;
    uint32_t result = method(crc, data.buf, (size_t)data.len);
    PyBuffer_Release(&data);
    return PyLong_FromUnsignedLong(result);
}

static PyObject *module_crc32(PyObject *Py_UNUSED(module), PyObject *args) { return crc32_by(rdmacm_crc32, args); }

static PyObject *module_crc32_by_table(PyObject *Py_UNUSED(module), PyObject *args) {
    return crc32_by(rdmacm_crc32_by_table, args);
}

static PyObject *module_icrc_start(PyObject *Py_UNUSED(module), PyObject *args) {
    const char *source, *destination;
    Py_ssize_t source_length, destination_length;
    unsigned int sport, dport, length, identification;
    struct rdmacm_flow flow;
    if (!PyArg_ParseTuple(args, "y#y#IIII", &source, &source_length, &destination, &destination_length, &sport,
                          &dport, &length, &identification))
        return NULL;
    if (source_length != destination_length || (source_length != 4 && source_length != 16) || sport > 0xFFFF ||
        dport > 0xFFFF)
        return PyErr_Format(PyExc_ValueError, "two addresses of 4 or 16 bytes and two ports are wanted");
    rdmacm_flow_init(&flow, (const uint8_t *)source, (const uint8_t *)destination, (size_t)source_length,
                     (uint16_t)sport, (uint16_t)dport);
    return Py_BuildValue("II", flow.base, rdmacm_flow_start(&flow, length, (uint16_t)identification));
}

static PyObject *module_icrc_solve(PyObject *Py_UNUSED(module), PyObject *args) {
    unsigned int base, guess;
    int is_ipv6;
    Py_buffer packet;
    if (!PyArg_ParseTuple(args, "Ipy*I", &base, &is_ipv6, &packet, &guess))
        return NULL;
    struct rdmacm_flow flow = {.base = base, .is_ipv6 = is_ipv6};
    size_t size = (size_t)packet.len;
    uint32_t crc = rdmacm_crc32(rdmacm_flow_start(&flow, size, (uint16_t)guess), packet.buf, size);
    int32_t found = rdmacm_flow_solve(&flow, crc, size, (uint16_t)guess);
    PyBuffer_Release(&packet);
    return PyLong_FromLong(found);
}

static PyMethodDef module_methods[] = {
    {"crc32", module_crc32, METH_VARARGS, "crc32(data, crc=0): as zlib.crc32."},
    {"crc32_by_table", module_crc32_by_table, METH_VARARGS, "crc32_by_table(data, crc=0): without instructions."},
    {"icrc_start", module_icrc_start, METH_VARARGS,
     "icrc_start(source, destination, sport, dport, length, identification): base, and start of the ICRC."},
    {"icrc_solve", module_icrc_solve, METH_VARARGS,
     "icrc_solve(base, is_ipv6, packet, guess): the IPv4 identification, -1 for a damaged packet."},
    {"configure_wc", configure_wc, METH_VARARGS,
     "configure_wc(WC, statuses, opcodes of sends, RECV, RECV_RDMA_WITH_IMM): what completions are made of."},
    {"configure_requests", configure_requests, METH_VARARGS,
     "configure_requests(SendWR, RecvWR, SGE, MR, AH, UnsignaledWrId): the classes of requests."},
    {NULL, NULL, 0, NULL},
};

/* -- the module ------------------------------------------------------------------------------------------------------ */

/* Its types and what the functions configure_* get are global, so there is one module, in the main interpreter. */
static PyObject *the_module;
static bool is_complete;

static PyObject *module_create(PyObject *Py_UNUSED(spec), PyModuleDef *Py_UNUSED(definition)) {
    if (PyInterpreterState_GetID(PyInterpreterState_Get()) != 0)
        return PyErr_Format(PyExc_ImportError, "the compiled core is for the main interpreter alone");
    if (!the_module)
        the_module = PyModule_New(MODULE_NAME);
    return Py_XNewRef(the_module);
}

static int module_exec(PyObject *module) {
    if (is_complete)
        return 0;
    rdmacm_init();
    rdmacm_mutex_init();
#define AND_INIT(part) &&part##_init(module)
    is_complete = intern_names() FOR_PARTS(AND_INIT) &&
                  PyModule_AddStringConstant(module, "CRC32_METHOD", rdmacm_crc32_method()) == 0;
    return is_complete ? 0 : -1;
}

/* Not Py_mod_gil: where Python runs without the interpreter's lock, the import brings it back. */
static PyModuleDef_Slot module_slots[] = {
    {Py_mod_create, (void *)(uintptr_t)module_create},
    {Py_mod_exec, (void *)(uintptr_t)module_exec},
    {0, NULL},
};

static struct PyModuleDef module_definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = MODULE_NAME,
    .m_doc = "The compiled core (docs/core.md).",
    .m_methods = module_methods,
    .m_slots = module_slots,
};

PyMODINIT_FUNC PyInit__core(void) { return PyModuleDef_Init(&module_definition); }
