// Tells torch's CPU build that devices called "cuda" may exist; all else about them is Python's.
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/FakeGuardImpl.h>

namespace {
c10::impl::FakeGuardImpl<c10::DeviceType::CUDA> guard;
const c10::impl::DeviceGuardImplRegistrar registered(c10::DeviceType::CUDA, &guard);
}

extern "C" void set_device(int index) {
  c10::impl::FakeGuardImpl<c10::DeviceType::CUDA>::setDeviceIndex(static_cast<c10::DeviceIndex>(index));
}
