// Tells torch's CPU build that devices called "cuda" may exist; all else about them is Python's. torch has such a guard
// for its own tests, with eight devices. The processes of an engine of two stages see sixteen.
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {
constexpr c10::DeviceIndex MOST = 64;
thread_local c10::DeviceIndex current = 0;

struct Guard final : public c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::DeviceType::CUDA; }
  c10::Device getDevice() const override { return {type(), current}; }
  c10::DeviceIndex deviceCount() const noexcept override { return MOST; }

  void uncheckedSetDevice(c10::Device device) const noexcept override { current = device.index(); }

  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.is_cuda() && device.index() >= 0 && device.index() < MOST, "no such device: ", device);
    current = device.index();
  }

  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device before = getDevice();
    setDevice(device);
    return before;
  }

  // Streams are Python's, too: here each device has one.
  c10::Stream getStream(c10::Device device) const override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return getStream(stream.device()); }
};

Guard guard;
const c10::impl::DeviceGuardImplRegistrar registered(c10::DeviceType::CUDA, &guard);
}

extern "C" void set_device(int index) {
  guard.setDevice({c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(index)});
}
