// A device whose memory is host memory, but whose tensors do not mix with those of the CPU, as on a GPU.
//
// Operators run on the CPU over the same memory. What a GPU refuses is refused: arguments on two devices. cuDNN's
// recurrent layers and sparse tensors are missing.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/extension.h>

#include <cstdlib>
#include <set>

namespace {

using at::Tensor;
using c10::IntArrayRef;

const auto kType = c10::DeviceType::PrivateUse1;
const auto kKeys = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);

c10::Device device() {
  return c10::Device(kType, 0);
}

c10::Stream only_stream() {
  return c10::Stream(c10::Stream::DEFAULT, device());
}

// ---- device, memory and streams ----

struct Guard final : c10::impl::DeviceGuardImplInterface {
  Guard() = default;
  explicit Guard(c10::DeviceType) {}
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device) const override { return device(); }
  c10::Device getDevice() const override { return device(); }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const override { return only_stream(); }
  c10::Stream getNewStream(c10::Device, int) const override { return only_stream(); }
  c10::Stream getDefaultStream(c10::Device) const override { return only_stream(); }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override { return only_stream(); }
  c10::Stream exchangeStream(c10::Stream) const override { return only_stream(); }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
};

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    void* start = size ? std::malloc(size) : nullptr;
    return {start, start, &std::free, device()};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &std::free; }
  void copy_data(void* target, const void* source, std::size_t size) const override {
    default_copy_data(target, source, size);
  }
};

Memory memory;

struct Hooks final : at::PrivateUse1HooksInterface {
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return at::globalContext().defaultGenerator(c10::Device(c10::kCPU));
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::detail::createCPUGenerator(); }
  c10::Device getDeviceFromPtr(void*) const override { return device(); }
  bool isPinnedPtr(const void*) const override { return false; }
  c10::Allocator* getPinnedMemoryAllocator() const override { return c10::GetAllocator(c10::kCPU); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    auto* held = storage.unsafeGetStorageImpl();
    auto fresh = memory.allocate(size);
    if (held->nbytes() && size) std::memcpy(fresh.mutable_get(), held->data(), std::min(size, held->nbytes()));
    held->set_data_ptr_noswap(std::move(fresh));
    held->set_nbytes(size);
  }
};

// A tensor of the CPU over the same memory.
Tensor on_cpu(const Tensor& tensor) {
  if (!tensor.defined() || tensor.device().type() != kType) return tensor;
  auto storage = tensor.storage();
  auto* start = static_cast<char*>(storage.mutable_data()) + tensor.storage_offset() * tensor.itemsize();
  auto options = tensor.options().device(c10::kCPU);
  auto same = at::from_blob(start, tensor.sizes(), tensor.strides(), [storage](void*) {}, options);
  if (tensor.is_conj()) same = same.conj();
  return tensor.is_neg() ? same._neg_view() : same;
}

Tensor moved(const Tensor& tensor) {
  return tensor.defined() ? tensor.to(device()) : tensor;
}

// ---- operators that have no fallback ----

Tensor empty(IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(size, &memory, kKeys, c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(IntArrayRef size, IntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(size, stride, &memory, kKeys, c10::dtype_or_default(dtype));
}

Tensor copy_from(const Tensor& source, const Tensor& target, bool) {
  at::NoGradGuard no_grad;
  on_cpu(target).copy_(on_cpu(source));
  return target;
}

Tensor copy_from_and_resize(const Tensor& source, const Tensor& target) {
  target.resize_(source.sizes());
  return copy_from(source, target, false);
}

const Tensor& resize(const Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat> format) {
  auto wanted = C10_AS_INTARRAYREF_SLOW(size);
  if (self.sizes() == wanted) return self;
  auto* held = self.unsafeGetTensorImpl();
  held->set_sizes_contiguous(wanted);
  size_t needed = (held->numel() + held->storage_offset()) * self.itemsize();
  if (held->storage().nbytes() < needed) {
    at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(held->storage(), needed);
  }
  if (format && *format != at::MemoryFormat::Contiguous) held->empty_tensor_restride(*format);
  return self;
}

Tensor& set_storage(Tensor& self, at::Storage storage, int64_t offset, IntArrayRef size, IntArrayRef stride) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(storage);
  self.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride, offset);
  return self;
}

Tensor& set_whole_storage(Tensor& self, at::Storage storage) {
  int64_t count = storage.nbytes() / self.itemsize();
  return set_storage(self, storage, 0, {count}, {1});
}

Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

Tensor convolution(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias, IntArrayRef stride,
                   IntArrayRef padding, IntArrayRef dilation, bool transposed, IntArrayRef output_padding, int64_t groups) {
  TORCH_CHECK(input.device() == weight.device(), "Expected all tensors to be on the same device");
  std::optional<Tensor> own;
  if (bias && bias->defined()) own = on_cpu(*bias);
  return moved(at::convolution(on_cpu(input), on_cpu(weight), own, stride, padding, dilation, transposed,
                               output_padding, groups));
}

std::tuple<Tensor, Tensor, Tensor> convolution_backward(
    const Tensor& grad, const Tensor& input, const Tensor& weight, IntArrayRef stride, IntArrayRef padding,
    IntArrayRef dilation, bool transposed, IntArrayRef output_padding, int64_t groups, std::array<bool, 3> mask) {
  std::vector<int64_t> bias{transposed ? weight.size(1) * groups : weight.size(0)};
  auto [d_input, d_weight, d_bias] =
      at::convolution_backward(on_cpu(grad), on_cpu(input), on_cpu(weight), at::OptionalIntArrayRef(bias), stride,
                               padding, dilation, transposed, output_padding, groups, mask);
  return {moved(d_input), moved(d_weight), moved(d_bias)};
}

// Counts integers, as on a GPU.
Tensor histogram(const Tensor& self, int64_t bins, const at::Scalar& low, const at::Scalar& high) {
  return moved(at::histc(on_cpu(self).to(at::kFloat), bins, low, high).to(self.scalar_type()));
}

// ---- all others ----

// Their indices or lengths may be on the CPU on a GPU, too.
const std::set<std::string> kMixed = {
    "aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_", "aten::_ctc_loss",
    "aten::_ctc_loss_backward"};

void check_device(const Tensor& tensor, const std::string& name) {
  if (!tensor.defined() || tensor.dim() == 0 || tensor.device().type() == kType) return;
  TORCH_CHECK(false, "Expected all tensors to be on the same device, but found at least two devices, ", device(),
              " and ", tensor.device(), "! (", name, ")");
}

void run_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  if (!kMixed.count(schema.name())) {
    for (size_t i = stack->size() - schema.arguments().size(); i < stack->size(); ++i) {
      const auto& given = (*stack)[i];
      if (given.isTensor()) check_device(given.toTensor(), schema.name());
      if (given.isTensorList()) {
        for (const Tensor& tensor : given.toTensorVector()) check_device(tensor, schema.name());
      }
    }
  }
  at::native::cpu_fallback(op, stack);
}

// A collective of the CPU's backend over the same memory, so that work in flight writes there.
void run_collective(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  auto same = [](const c10::IValue& list) {
    c10::List<Tensor> found;
    for (const Tensor& tensor : list.toTensorVector()) found.push_back(on_cpu(tensor));
    return found;
  };
  for (size_t i = stack->size() - op.schema().arguments().size(); i < stack->size(); ++i) {
    auto& given = (*stack)[i];
    if (given.isTensor()) {
      given = on_cpu(given.toTensor());
    } else if (given.isTensorList()) {
      given = same(given);
    } else if (given.isList() && given.toListRef().size() && given.toListRef()[0].isTensorList()) {
      c10::List<c10::List<Tensor>> nested;
      for (const auto& list : given.toListRef()) nested.push_back(same(list));
      given = nested;
    }
  }
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
}

}  // namespace

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);
REGISTER_ALLOCATOR(kType, &memory);

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", [](const Tensor& self) { return at::_local_scalar_dense(on_cpu(self)); });
  m.impl("_has_compatible_shallow_copy_type", [](const Tensor&, const Tensor&) { return true; });
  m.impl("as_strided", [](const Tensor& self, IntArrayRef size, IntArrayRef stride, std::optional<int64_t> offset) {
    return at::native::as_strided_tensorimpl(self, size, stride, offset);
  });
  m.impl("view", [](const Tensor& self, c10::SymIntArrayRef size) {
    return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size));
  });
  m.impl("_reshape_alias", [](const Tensor& self, IntArrayRef size, IntArrayRef stride) {
    return at::native::_reshape_alias(self, size, stride);
  });
  m.impl("unfold", [](const Tensor& self, int64_t dim, int64_t size, int64_t step) {
    return at::native::unfold(self, dim, size, step);
  });
  m.impl("resize_", resize);
  m.impl("set_.source_Storage", set_whole_storage);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_", [](Tensor& self) -> Tensor& { return set_tensor(self, at::empty({0}, self.options())); });
  m.impl("histc", histogram);
  m.impl("convolution_overrideable", convolution);
  m.impl("convolution_backward_overrideable", convolution_backward);
}

TORCH_LIBRARY_IMPL(c10d, PrivateUse1, m) {
  for (const char* name :
       {"broadcast_", "allreduce_", "allreduce_coalesced_", "allgather_", "_allgather_base_", "allgather_coalesced_",
        "allgather_into_tensor_coalesced_", "reduce_scatter_", "_reduce_scatter_base_",
        "reduce_scatter_tensor_coalesced_", "reduce_", "gather_", "scatter_", "alltoall_", "alltoall_base_", "barrier",
        "send", "recv_", "recv_any_source_"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&run_collective>());
  }
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}

#define IN_16_BIT(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define IN_FP32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define IN_WIDEST(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  AT_FORALL_LOWER_PRECISION_FP(IN_16_BIT)
  AT_FORALL_FP32(IN_FP32)
  AT_FORALL_PROMOTE(IN_WIDEST)
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("register_hooks", []() { at::RegisterPrivateUse1HooksInterface(new Hooks()); });
}
