module row

go 1.21

require github.com/hugelgupf/vmtest v0.0.0-20240307030256-5d9f3d34a58d
