module ways

go 1.19
