/* LD_PRELOAD: libtorch believes that no accelerator is there, or autograd would ask a driver for its streams.

at::accelerator::getAccelerator(bool) returns no type, at::accelerator::isAccelerator(type) that CUDA is none. The mangled
names are those of torch 2.11 and 2.14. */
short _ZN2at11accelerator14getAcceleratorEb(_Bool checked) { (void)checked; return 0; }
_Bool _ZN2at11accelerator13isAcceleratorEN3c1010DeviceTypeE(signed char type) { (void)type; return 0; }
