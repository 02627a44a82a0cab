"""Ray's direct transport of tensors between actors over torch_mooncake's transfer engine.

    from torch_mooncake.integrations import ray as tm_ray
    tm_ray.register()                       # before the actors' classes are

    @ray.remote(enable_tensor_transport=True)
    class Trainer:
        @ray.method(tensor_transport="torch_mooncake")
        def weights(self): ...

See ``docs/integrations/ray.md``. Ray is imported with the first use.
"""

from torch_mooncake.integrations._lazy import lazily

__all__ = ["NAME", "TorchMooncakeTransport", "register"]
NAME = "TORCH_MOONCAKE"  # Ray names transports in capitals, and takes any case
__getattr__ = lazily(__name__, {"TorchMooncakeTransport": "transport", "register": "transport"})
