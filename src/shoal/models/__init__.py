"""Reference models by name, each a plain `nn.Module`; `section` says what a recipe can set, `build` makes one."""
