// Calls of other libraries' FFI handlers, from programs that are good for more than one process.
//
// Some handlers are told addresses of their process in attributes, as those of MPI are. A program that has such
// addresses is good for one process. Here an attribute of 32 bits is a place in a table that each process fills for
// itself, and stands for the 64 bits that are there; the one that is called "to" says which handler is meant. Knows
// no MPI.

#include <cstdint>
#include <string_view>

#include "xla/ffi/api/ffi.h"

#define EXPORTED __attribute__((visibility("default")))

namespace jaxlamina {
namespace {

namespace ffi = xla::ffi;

constexpr int kPlaces = 64, kMostAttributes = 24;
int64_t table[kPlaces];

// Says of itself what XLA asks a handler, and refuses whatever has attributes.
XLA_FFI_DEFINE_HANDLER(none, [] { return ffi::Error::Success(); }, ffi::Ffi::Bind());

XLA_FFI_Error* forward(XLA_FFI_CallFrame* frame) {
  const XLA_FFI_Attrs& given = frame->attrs;
  if (given.size == 0 || given.size > kMostAttributes) return none(frame);
  XLA_FFI_AttrType types[kMostAttributes];
  XLA_FFI_ByteSpan* names[kMostAttributes];
  void* attributes[kMostAttributes];
  XLA_FFI_Scalar scalars[kMostAttributes];
  XLA_FFI_Handler* to = nullptr;
  int64_t n = 0;
  for (int64_t i = 0; i < given.size; ++i) {
    types[n] = given.types[i];
    names[n] = given.names[i];
    attributes[n] = given.attrs[i];
    if (types[n] == XLA_FFI_AttrType_SCALAR) {
      const auto* scalar = static_cast<const XLA_FFI_Scalar*>(given.attrs[i]);
      if (scalar->dtype == XLA_FFI_DataType_S32) {
        const int32_t place = *static_cast<const int32_t*>(scalar->value);
        if (place < 0 || place >= kPlaces) return none(frame);
        if (std::string_view(names[n]->ptr, names[n]->len) == "to") {
          to = reinterpret_cast<XLA_FFI_Handler*>(table[place]);
          continue;
        }
        scalars[n] = {XLA_FFI_DataType_S64, &table[place]};
        attributes[n] = &scalars[n];
      }
    }
    ++n;
  }
  if (to == nullptr) return none(frame);
  XLA_FFI_CallFrame call = *frame;
  call.attrs.size = n;
  call.attrs.types = types;
  call.attrs.names = names;
  call.attrs.attrs = attributes;
  XLA_FFI_Error* error = to(&call);
  frame->future = call.future;
  return error;
}

}  // namespace
}  // namespace jaxlamina

extern "C" EXPORTED XLA_FFI_Error* jaxlamina_forward(XLA_FFI_CallFrame* frame) { return jaxlamina::forward(frame); }

// False where the table has no such place.
extern "C" EXPORTED bool jaxlamina_forward_place(int place, int64_t value) {
  if (place < 0 || place >= jaxlamina::kPlaces) return false;
  jaxlamina::table[place] = value;
  return true;
}
